// What the parts of the simulated device know of one another.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include "streams.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

bool is_pinned(const void* data);
at::Generator draw(const std::optional<at::Generator>& given);  // a generator of the CPU for one random kernel
BlockPtr block_of(const at::Tensor& tensor);
c10::Stream torch_stream(int number);
int number_of(const c10::Stream& stream);

at::Tensor as_cpu(const at::Tensor& tensor);  // the same memory, for a kernel to work on
Use use_of(const at::Tensor& tensor, bool write);

}  // namespace sim
