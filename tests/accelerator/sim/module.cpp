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
  pybind11::class_<sim::Happening, sim::HappeningPtr>(m, "Gate").def("open", [](const sim::HappeningPtr& gate) { sim::open(gate); });
  m.def("hold", [] { return sim::hold(sim::current_stream(sim::current_device())); }, "What is issued on the current stream from now on waits until this is opened.");
  m.def("peek", [](const at::Tensor& tensor) { return sim::as_cpu(tensor).clone(); }, "What the memory holds now, whoever is about to write it.");
  m.def("waits", [] { return sim::report().waits; });
  m.def("violations", [] { return sim::report().violations; });
  m.def("kernels", [] { return sim::report().kernels; });
  m.def("order", [] { return sim::report().order; }, "A number that another order of kernels on streams would not give.");
  m.def("memory", [] {
    auto memory = sim::report().memory;
    return std::make_tuple(memory.allocated, memory.allocations, memory.asked);
  });
  m.def("reset", &sim::reset_report);
  m.def("communicators", &sim::communicators_made);
  m.def("forget_communicators", &sim::forget_communicators);

  using Group = sim::StrictGroup;
  pybind11::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend> group(m, "StrictGroup");
  pybind11::class_<sim::Config>(group, "Config").def_readwrite("min_ctas", &sim::Config::min_ctas);
  pybind11::class_<Group::Options, c10::intrusive_ptr<Group::Options>, c10d::Backend::Options>(group, "Options")
      .def(pybind11::init<>())
      .def_readwrite("is_high_priority_stream", &Group::Options::is_high_priority_stream)
      .def_readwrite("config", &Group::Options::config);
  group.def(pybind11::init<c10::intrusive_ptr<c10d::Store>, int, int, c10::intrusive_ptr<Group::Options>>())
      .def_readonly("error_handling", &Group::error_handling)
      .def_property_readonly("options", [](Group& self) { return c10::dynamic_intrusive_pointer_cast<Group::Options>(self.getBackendOptions()); })
      .def("meet", &Group::meet, release())
      .def("abort", &Group::abort, release());
}
