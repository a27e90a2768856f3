// Operators. What every operator does: find the shapes of what it gives by running it on the meta device, make that, and
// issue a kernel that runs the CPU's operator on the same memory, later, in the stream's thread.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <sstream>

namespace sim {

at::Tensor as_cpu(const at::Tensor& tensor) {
  auto block = block_of(tensor);
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!block || tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* data = block->data + tensor.storage_offset() * tensor.element_size();
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [block](void*) {}, options);
}

Use use_of(const at::Tensor& tensor, bool write) {
  auto block = block_of(tensor);
  if (!block || tensor.numel() == 0) return {std::make_shared<Block>(), 0, 0, true};
  int64_t last = 0;
  for (int64_t n = 0; n < tensor.dim(); ++n) last += (tensor.size(n) - 1) * tensor.stride(n);
  size_t begin = tensor.storage_offset() * tensor.element_size();
  return {block, begin, begin + (last + 1) * tensor.element_size(), write};
}

namespace {

using Stack = torch::jit::Stack;
using Each = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue map_tensors(const c10::IValue& value, const Each& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec()) {
      list.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
  map_tensors(value, [&](const at::Tensor& tensor) { see(tensor); return tensor; });
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;  // a number
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  int64_t elements = tensor.has_storage() ? tensor.storage().nbytes() / tensor.element_size() : 0;
  return at::empty({elements}, options).as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor for_kernel(const at::Tensor& tensor) {
  if (tensor.is_privateuseone()) return as_cpu(tensor);
  TORCH_CHECK(tensor.dim() == 0, "a tensor on ", tensor.device(), " of shape ", tensor.sizes(), " among tensors of the simulated device");
  auto copy = tensor.clone();  // read when it is issued, as on other devices
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

struct Writes {  // which arguments an operator writes, which results are arguments, and which are views of one
  const c10::FunctionSchema& schema;
  bool argument(size_t n) const {
    auto* alias = schema.arguments()[n].alias_info();
    return alias && alias->isWrite();
  }
  int source(size_t result) const {
    auto* alias = schema.returns()[result].alias_info();
    for (size_t n = 0; alias && n < schema.arguments().size(); ++n) {
      auto* other = schema.arguments()[n].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) return static_cast<int>(n);
    }
    return -1;
  }
};

bool is_device_type(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::DeviceObjType;
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

Stack converted(const c10::FunctionSchema& schema, const Stack& given, const Each& change, c10::Device device) {
  Stack stack;
  for (size_t n = 0; n < given.size(); ++n) {
    stack.push_back(is_device_type(schema.arguments()[n]) && !given[n].isNone() ? c10::IValue(device) : map_tensors(given[n], change));
  }
  return stack;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(&stack);
}

at::Tensor like(const at::Tensor& meta, c10::Device device) {
  return at::empty_strided(meta.sizes(), meta.strides(), at::TensorOptions().dtype(meta.dtype()).device(device));
}

at::Tensor view_like(const at::Tensor& base, const at::Tensor& meta) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), meta.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(meta.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  return view;
}

// The tensors that a kernel's results are copied to, in order.
void gather(const c10::IValue& value, std::vector<at::Tensor>& into) {
  if (value.isTensor()) into.push_back(value.toTensor());
  if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) into.push_back(tensor);
}

// An operator that is given its output may resize it, even on the way: it gets an empty one, which is copied.
bool has_out(const c10::FunctionSchema& schema) { return schema.overload_name().find("out") != std::string::npos; }

void empty_outs(const c10::FunctionSchema& schema, Stack& stack) {
  for (size_t n = 0; has_out(schema) && n < stack.size(); ++n) {
    if (Writes{schema}.argument(n) && stack[n].isTensor()) stack[n] = at::empty({0}, stack[n].toTensor().options());
  }
}

void issue(const c10::OperatorHandle& op, const Stack& given, const std::vector<c10::IValue>& fresh, const std::vector<size_t>& places, c10::Device device) {
  const auto& schema = op.schema();
  Writes writes{schema};
  std::vector<Use> uses;
  for (size_t n = 0; n < given.size(); ++n) {
    each_tensor(given[n], [&](const at::Tensor& tensor) {
      if (tensor.is_privateuseone()) uses.push_back(use_of(tensor, writes.argument(n)));
    });
  }
  Stack stack = converted(schema, given, for_kernel, at::kCPU);
  empty_outs(schema, stack);
  for (size_t n = 0; n < given.size(); ++n) {
    if (is_generator(schema.arguments()[n])) stack[n] = draw(given[n].isNone() ? std::nullopt : std::optional(given[n].toGenerator()));
  }
  std::vector<std::vector<at::Tensor>> outputs;
  for (const auto& value : fresh) {
    std::vector<at::Tensor> tensors, views;
    gather(value, tensors);
    for (const auto& tensor : tensors) {
      views.push_back(tensor.defined() ? as_cpu(tensor) : tensor);
      if (tensor.defined()) uses.push_back(use_of(tensor, true));
    }
    outputs.push_back(views);
  }
  auto kernel = [op, stack, outputs, places]() mutable {
    call(op, stack);
    for (size_t n = 0; n < outputs.size(); ++n) {
      std::vector<at::Tensor> results;
      gather(stack[places[n]], results);
      for (size_t k = 0; k < results.size(); ++k) {
        if (outputs[n][k].defined() && results[k].defined()) outputs[n][k].copy_(results[k]);
      }
    }
  };
  enqueue(current_stream(device.index()), c10::toString(op.operator_name()), std::move(kernel), uses);
}

// An operator whose results cannot be known without its data: the host waits, as it does on every device.
void run_now(const c10::OperatorHandle& op, Stack* stack, size_t arguments, c10::Device device, const std::string& reason) {
  const auto& schema = op.schema();
  wait_stream(current_stream(device.index()), c10::toString(op.operator_name()) + ": " + reason.substr(0, reason.find('\n')));
  Stack now = converted(schema, {stack->end() - arguments, stack->end()}, for_kernel, at::kCPU);
  call(op, now);
  std::vector<Use> uses;
  for (size_t n = 0; n < arguments; ++n) {
    each_tensor(*(stack->end() - arguments + n), [&](const at::Tensor& tensor) {
      if (tensor.is_privateuseone()) uses.push_back(use_of(tensor, Writes{schema}.argument(n)));
    });
  }
  enqueue(current_stream(device.index()), c10::toString(op.operator_name()), [] {}, uses);
  Stack results;
  for (const auto& value : now) {
    results.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
      auto there = like(tensor, device);
      enqueue(current_stream(device.index()), "results", [to = as_cpu(there), tensor]() mutable { to.copy_(tensor); }, {use_of(there, true)});
      return there;
    }));
  }
  torch::jit::drop(*stack, arguments);
  stack->insert(stack->end(), results.begin(), results.end());
}

c10::Device device_among(const c10::FunctionSchema& schema, const Stack& given) {
  std::optional<c10::Device> found;
  for (const auto& value : given) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.is_privateuseone() && !found) found = tensor.device();
    });
  }
  for (size_t n = 0; n < given.size() && !found; ++n) {
    if (is_device_type(schema.arguments()[n]) && !given[n].isNone()) found = given[n].toDevice();
  }
  auto device = found.value_or(c10::Device(kSim, static_cast<c10::DeviceIndex>(current_device())));
  return device.has_index() ? device : c10::Device(kSim, static_cast<c10::DeviceIndex>(current_device()));
}

// All that the shapes of results depend on, as a text. The meta device finds many of them in Python, which takes milliseconds.
std::string shapes_in(const c10::OperatorHandle& op, const Stack& given) {
  std::ostringstream text;
  text << op.operator_name() << c10::get_default_dtype_as_scalartype();
  for (const auto& value : given) {
    text << '|';
    bool tensors = false;
    each_tensor(value, [&](const at::Tensor& tensor) {
      tensors = true;
      text << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.storage_offset() << ',' << tensor.device().type()
           << tensor.unsafeGetTensorImpl()->is_wrapped_number() << (tensor.has_storage() ? tensor.storage().nbytes() : 0) << ';';
    });
    if (value.isTensorList() || value.isOptionalTensorList()) text << value.toListRef().size();
    else if (!tensors) text << value;
  }
  return text.str();
}

Stack shapes_of_results(const c10::OperatorHandle& op, const Stack& given, bool known) {
  static std::mutex mutex;
  static auto* found = new std::map<std::string, Stack>;
  auto key = known ? shapes_in(op, given) : std::string();
  if (known) {
    std::lock_guard<std::mutex> lock(mutex);
    auto place = found->find(key);
    if (place != found->end()) return place->second;
  }
  const auto& schema = op.schema();
  Stack metas = converted(schema, given, on_meta, at::kMeta);
  empty_outs(schema, metas);
  for (size_t n = 0; n < given.size(); ++n) if (is_generator(schema.arguments()[n])) metas[n] = c10::IValue();
  call(op, metas);
  std::lock_guard<std::mutex> lock(mutex);
  if (known) found->emplace(key, metas);
  return metas;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t arguments = schema.arguments().size();
  Stack given(stack->end() - arguments, stack->end());
  auto device = device_among(schema, given);
  c10::DeviceGuard guard(device);
  Writes writes{schema};
  bool only_writes = true;
  for (size_t n = 0; n < schema.returns().size(); ++n) {
    int source = writes.source(n);
    only_writes &= source >= 0 && writes.argument(source);
  }
  bool resizes = has_out(schema);
  Stack metas;
  if (!only_writes || resizes) {
    try {
      metas = shapes_of_results(op, given, !resizes);
    } catch (const std::exception& reason) {
      run_now(op, stack, arguments, device, reason.what());
      return;
    }
  }
  Stack results;
  std::vector<c10::IValue> fresh;
  std::vector<size_t> places;
  bool view = false;
  for (size_t n = 0; n < schema.returns().size(); ++n) {
    int source = writes.source(n);
    if (source >= 0 && writes.argument(source)) {
      if (resizes && metas[n].isTensor() && given[source].toTensor().sizes() != metas[n].toTensor().sizes()) {
        auto tensor = given[source].toTensor();
        auto larger = like(metas[n].toTensor(), device);
        tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(larger.storage());
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(larger.sizes(), larger.strides());
      }
      results.push_back(given[source]);
      if (resizes) fresh.push_back(given[source]), places.push_back(n);
    } else if (source >= 0) {
      view = true;
      results.push_back(map_tensors(metas[n], [&](const at::Tensor& meta) { return view_like(given[source].toTensor(), meta); }));
    } else {
      results.push_back(map_tensors(metas[n], [&](const at::Tensor& meta) { return like(meta, device); }));
      fresh.push_back(results.back());
      places.push_back(n);
    }
  }
  if (!view) issue(op, given, fresh, places, device);
  torch::jit::drop(*stack, arguments);
  stack->insert(stack->end(), results.begin(), results.end());
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), c10::GetAllocator(kSim), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::GetAllocator(kSim), keys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto device = to.is_privateuseone() ? to.device() : from.device();
  c10::DeviceGuard guard(device);
  int stream = current_stream(device.index());
  if (from.is_privateuseone() && to.is_privateuseone()) {
    enqueue(stream, "copy", [a = as_cpu(from), b = as_cpu(to)]() mutable { b.copy_(a); }, {use_of(from, false), use_of(to, true)});
  } else if (to.is_privateuseone()) {
    bool pinned = is_pinned(from.storage().data());
    if (!pinned || !non_blocking) count_wait(pinned ? "a copy from the host that blocks" : "a copy from pageable memory of the host");
    auto source = pinned && non_blocking ? from.alias() : from.clone();
    enqueue(stream, "copy from host", [source, b = as_cpu(to)]() mutable { b.copy_(source); }, {use_of(to, true)});
  } else {
    bool blocks = !non_blocking || !is_pinned(to.storage().data());
    enqueue(stream, "copy to host", [a = as_cpu(from), b = to.alias()]() mutable { b.copy_(a); }, {use_of(from, false)});
    if (blocks) wait_stream(stream, "a copy to the host");
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  int stream = current_stream(tensor.device().index());
  at::Tensor here = at::empty({}, tensor.options().device(at::kCPU));
  enqueue(stream, "item", [a = as_cpu(tensor), here]() mutable { here.copy_(a.reshape({})); }, {use_of(tensor, false)});
  wait_stream(stream, "item");
  return at::_local_scalar_dense(here);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t wanted = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.element_size();
  if (wanted > tensor.storage().nbytes()) {
    c10::DeviceGuard guard(tensor.device());
    auto larger = at::empty({static_cast<int64_t>(wanted)}, tensor.options().dtype(at::kByte));
    if (tensor.numel()) {
      enqueue(current_stream(tensor.device().index()), "resize", [a = as_cpu(tensor), to = block_of(larger), bytes = tensor.storage().nbytes()] {
        std::memcpy(to->data, a.storage().data(), std::min(bytes, to->bytes));
      }, {use_of(tensor, false), use_of(larger, true)});
    }
    impl->set_storage_keep_dtype(larger.storage());
  }
  impl->set_sizes_contiguous(sizes);
  return tensor;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  if (auto block = block_of(tensor)) block->recorded.insert(number_of(stream));
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, c10::Storage storage) {
  int64_t elements = storage.nbytes() / tensor.element_size();
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({elements});
  return tensor;
}

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  bool drops = train.value_or(true) && p > 0;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  drops ? mask.bernoulli_(1 - p) : mask.fill_(true);  // the one that is asked for its generator
  return {input.mul(mask).mul(drops && p < 1 ? 1 / (1 - p) : 1), mask};
}

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // the one that is written in operators
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("_fused_sdp_choice", &plain_attention);
  m.impl("native_dropout", &dropout);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace
}  // namespace sim
