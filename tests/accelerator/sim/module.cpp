// What Python gets.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "group.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;

  m.def("device_count", &sim::device_count);
  m.def("current_device", &sim::current_device);
  m.def("set_device", [](int device) { sim::exchange_device(device); });
  m.def("synchronize", [](int device) { sim::wait_device(device, "synchronize"); }, release());
  m.def("generator", [](int device) { return at::globalContext().defaultGenerator(c10::Device(sim::kSim, static_cast<c10::DeviceIndex>(device))); });
  m.def("now", &sim::now);
  m.def("set_kernel_time", &sim::set_kernel_time, pybind11::arg("seconds"), pybind11::arg("jitter") = 0.0);
  m.def("set_hang_after", &sim::set_hang_after);
  m.def("busy", [](double seconds) {
    sim::enqueue(sim::current_stream(sim::current_device()), "busy", [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  m.def("peek", [](const at::Tensor& tensor) { return sim::as_cpu(tensor).clone(); }, "What the memory holds now, whoever is about to write it.");
  m.def("waits", [] { return sim::report().waits; });
  m.def("violations", [] { return sim::report().violations; });
  m.def("kernels", [] { return sim::report().kernels; });
  m.def("memory", [] {
    auto memory = sim::report().memory;
    return std::make_tuple(memory.allocated, memory.allocations, memory.asked);
  });
  m.def("reset", &sim::reset_report);
  m.def("communicators", &sim::communicators_made);
  m.def("forget_communicators", &sim::forget_communicators);

  pybind11::class_<sim::StrictGroup, c10::intrusive_ptr<sim::StrictGroup>, c10d::Backend>(m, "StrictGroup")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Store>, int, int, double>())
      .def("meet", &sim::StrictGroup::meet, release())
      .def("abort", &sim::StrictGroup::abort, release());
}
