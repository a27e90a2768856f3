// The group: from calls to kernels on the streams of communicators.
#include "group.h"

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <thread>

namespace sim {
namespace {

c10::Device here() { return {kSim, static_cast<c10::DeviceIndex>(current_device())}; }

size_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

void check(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone(), "strict: a tensor on ", tensor.device(), "; the group works on the simulated device");
  TORCH_CHECK(tensor.is_contiguous(), "strict: tensors must be contiguous");
  TORCH_CHECK(tensor.scalar_type() != at::kShort && !tensor.is_complex(), "strict: there is no message of type ", tensor.scalar_type());
}

int handling() {
  auto* given = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  return given ? std::atoi(given) : 3;
}

char* data_of(const at::Tensor& tensor) {
  auto block = block_of(tensor);
  return block ? block->data + tensor.storage_offset() * tensor.element_size() : nullptr;
}

}  // namespace

StrictWork::StrictWork(c10d::OpType type, int rank, HappeningPtr end, std::vector<at::Tensor> kept, c10::Device device, CommunicatorPtr on)
    : Work(rank, type), end(std::move(end)), kept(kept), results(std::move(kept)), device(device), on(std::move(on)) {}

bool StrictWork::isCompleted() { return is_done(end); }
bool StrictWork::isSuccess() const { return is_done(end) && !on->aborted; }
void StrictWork::synchronize() { wait(kNoTimeout); }
std::vector<at::Tensor> StrictWork::result() { return results; }

bool StrictWork::wait(std::chrono::milliseconds bound) {
  if (bound != kNoTimeout) wait_host(end, "a wait for a message with a bound", static_cast<double>(bound.count()) / 1e3);
  wait_event(current_stream(device.index()), end);
  kept.clear();
  results.clear();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> StrictWork::getFuture() {
  if (!future) {
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    c10::StreamGuard guard(torch_stream(on->stream));
    future->markCompleted(at::IValue(results));
  }
  return future;
}

StrictGroup::StrictGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
    : Backend(rank, size), error_handling(handling()), store(std::move(store)), options(options), bound(static_cast<double>(options->timeout.count()) / 1e3) {}

void StrictGroup::eagerConnectSingleDevice(at::Device device) {
  TORCH_CHECK(device.has_index(), "strict: a communicator needs the number of its device, got ", device);
  c10::DeviceGuard guard(device);
  eager = true;
  whole();
}

void StrictGroup::meet(const std::string& name, int count) {
  if (store->add("meet/" + name, 1) == count) store->set("met/" + name, std::vector<uint8_t>{1});
  store->wait({"met/" + name}, std::chrono::milliseconds(static_cast<int64_t>(bound * 1e3)));
}

CommunicatorPtr StrictGroup::communicator(const std::string& name, int rank, int size) {
  TORCH_CHECK(!gone, "strict: the group was aborted; make a new one");
  auto& found = communicators[name];
  if (!found) found = std::make_shared<Communicator>(store, name, rank, size, bound);
  return found;
}

CommunicatorPtr StrictGroup::whole() { return communicator(pg_uid_ + "/all", rank_, size_); }

CommunicatorPtr StrictGroup::with(int peer) {
  if (eager) return whole();
  int low = std::min(rank_, peer), high = std::max(rank_, peer);
  return communicator(pg_uid_ + "/" + std::to_string(low) + ":" + std::to_string(high), rank_ == low ? 0 : 1, 2);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::issue(const CommunicatorPtr& on, c10d::OpType type, const std::string& name, std::function<void()> kernel,
                                                  const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes) {
  std::vector<Use> uses;
  std::vector<at::Tensor> kept;
  for (const auto& tensor : reads) uses.push_back(use_of(tensor, false)), kept.push_back(tensor);
  for (const auto& tensor : writes) uses.push_back(use_of(tensor, true));
  auto device = here();
  wait_event(on->stream, record(current_stream(device.index())));
  enqueue(on->stream, name + " of communicator " + on->name, std::move(kernel), uses);
  auto keeps = writes;
  keeps.insert(keeps.end(), reads.begin(), reads.end());
  return c10::make_intrusive<StrictWork>(type, rank_, record(on->stream), keeps, device, on);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::point_to_point(std::vector<at::Tensor>& tensors, int peer, bool sends) {
  TORCH_CHECK(tensors.size() == 1, "strict: a message is one tensor");
  TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_, "strict: rank ", rank_, " has no peer ", peer);
  auto tensor = tensors[0];
  check(tensor);
  if (batch) {
    batch->push_back({tensor, peer, sends});
    return nullptr;
  }
  auto on = with(peer);
  int place = on->size == size_ ? peer : 1 - on->rank;
  on->arrive(place, sends);
  on->meet(place, sends);
  auto name = (sends ? "send to rank " : "receive from rank ") + std::to_string(peer);
  auto block = block_of(tensor);
  auto kernel = [on, place, sends, block, data = data_of(tensor), bytes = bytes_of(tensor)] {
    sends ? on->send(place, data, bytes) : on->receive(place, data, bytes);
  };
  std::vector<at::Tensor> one{tensor}, none;
  return issue(on, sends ? c10d::OpType::SEND : c10d::OpType::RECV, name, kernel, sends ? one : none, sends ? none : one);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::send(std::vector<at::Tensor>& tensors, int peer, int) { return point_to_point(tensors, peer, true); }
c10::intrusive_ptr<c10d::Work> StrictGroup::recv(std::vector<at::Tensor>& tensors, int peer, int) { return point_to_point(tensors, peer, false); }

void StrictGroup::startCoalescing() {
  batch.emplace();
  last.reset();
}

c10::intrusive_ptr<c10d::Work> StrictGroup::endCoalescing() {
  auto messages = std::move(*batch);
  batch.reset();
  if (messages.empty()) return std::move(last);
  auto on = whole();
  std::vector<at::Tensor> reads, writes;
  std::vector<BlockPtr> blocks;
  std::map<std::pair<int, bool>, std::vector<std::pair<char*, size_t>>> lanes;  // by peer and direction
  for (const auto& message : messages) {
    (message.sends ? reads : writes).push_back(message.tensor);
    blocks.push_back(block_of(message.tensor));
    lanes[{message.peer, message.sends}].emplace_back(data_of(message.tensor), bytes_of(message.tensor));
  }
  for (const auto& lane : lanes) on->arrive(lane.first.first, lane.first.second);
  for (const auto& lane : lanes) on->meet(lane.first.first, lane.first.second);
  auto kernel = [on, lanes, blocks] {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::string wrong;
    for (const auto& lane : lanes) {
      threads.emplace_back([&, lane] {
        try {
          auto [peer, sends] = lane.first;
          for (auto [data, bytes] : lane.second) sends ? on->send(peer, data, bytes) : on->receive(peer, data, bytes);
        } catch (const std::exception& error) {
          std::lock_guard<std::mutex> lock(mutex);
          wrong = error.what();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    TORCH_CHECK(wrong.empty(), wrong);
  };
  return issue(on, c10d::OpType::COALESCED, "batch of " + std::to_string(messages.size()), kernel, reads, writes);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  auto tensor = tensors.at(0);
  check(tensor);
  auto on = whole();
  int root = static_cast<int>(options.rootRank);
  auto kernel = [on, root, data = data_of(tensor), bytes = bytes_of(tensor), block = block_of(tensor)] {
    auto all = on->exchange(data, on->rank == root ? bytes : 0);
    if (on->rank != root) std::memcpy(data, all[root].data(), bytes);
  };
  bool gives = rank_ == root;
  std::vector<at::Tensor> one{tensor}, none;
  return last = issue(on, c10d::OpType::BROADCAST, "broadcast", kernel, gives ? one : none, gives ? none : one);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::reduce(const at::Tensor& input, const at::Tensor& output, c10d::ReduceOp op, c10d::OpType type, bool scatter) {
  check(input);
  check(output);
  auto on = whole();
  auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  auto kernel = [on, kind, scatter, in = as_cpu(input), out = as_cpu(output)]() mutable {
    auto all = on->exchange(static_cast<const char*>(in.data_ptr()), bytes_of(in));
    at::Tensor total;
    for (auto& part : all) {
      auto each = at::from_blob(part.data(), in.sizes(), in.options());
      using Kind = c10d::ReduceOp::RedOpType;
      total = !total.defined() ? each.clone() : kind == Kind::MAX ? at::maximum(total, each) : kind == Kind::MIN ? at::minimum(total, each) : total + each;
    }
    if (kind == c10d::ReduceOp::RedOpType::AVG) total = total / on->size;
    if (scatter) total = total.reshape({on->size, -1})[on->rank];
    out.copy_(total.reshape(out.sizes()));
  };
  bool in_place = input.is_same(output);
  return last = issue(on, type, "reduction", kernel, in_place ? std::vector<at::Tensor>{} : std::vector<at::Tensor>{input}, {output});
}

c10::intrusive_ptr<c10d::Work> StrictGroup::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  return reduce(tensors.at(0), tensors.at(0), options.reduceOp, c10d::OpType::ALLREDUCE, false);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (auto& tensor : tensors) reduce(tensor, tensor, options.reduceOp, c10d::OpType::ALLREDUCE, false);
  return last;
}

c10::intrusive_ptr<c10d::Work> StrictGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  check(input);
  check(output);
  auto on = whole();
  auto kernel = [on, from = data_of(input), to = data_of(output), bytes = bytes_of(input), a = block_of(input), b = block_of(output)] {
    auto all = on->exchange(from, bytes);
    for (size_t n = 0; n < all.size(); ++n) std::memcpy(to + n * bytes, all[n].data(), bytes);
  };
  bool inside = block_of(input) == block_of(output);
  return last = issue(on, c10d::OpType::_ALLGATHER_BASE, "all-gather", kernel, inside ? std::vector<at::Tensor>{} : std::vector<at::Tensor>{input}, {output});
}

c10::intrusive_ptr<c10d::Work> StrictGroup::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions&) {
  auto input = inputs.at(0);
  check(input);
  auto on = whole();
  std::vector<at::Tensor> views;
  for (const auto& output : outputs.at(0)) views.push_back(as_cpu(output));
  auto kernel = [on, in = as_cpu(input), views]() mutable {
    auto all = on->exchange(static_cast<const char*>(in.data_ptr()), bytes_of(in));
    for (size_t n = 0; n < all.size(); ++n) views[n].copy_(at::from_blob(all[n].data(), in.sizes(), in.options()));
  };
  return last = issue(on, c10d::OpType::ALLGATHER, "all-gather", kernel, {input}, outputs.at(0));
}

c10::intrusive_ptr<c10d::Work> StrictGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return reduce(input, output, options.reduceOp, c10d::OpType::_REDUCE_SCATTER_BASE, true);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs, const c10d::ReduceScatterOptions& options) {
  return reduce(at::stack(inputs.at(0)), outputs.at(0), options.reduceOp, c10d::OpType::REDUCE_SCATTER, true);
}

c10::intrusive_ptr<c10d::Work> StrictGroup::barrier(const c10d::BarrierOptions&) {
  auto token = at::zeros({1}, at::TensorOptions().device(here()));
  auto work = reduce(token, token, c10d::ReduceOp(c10d::ReduceOp::SUM), c10d::OpType::BARRIER, false);
  wait_stream(current_stream(current_device()), "barrier");
  return work;
}

void StrictGroup::abort() {
  gone = true;
  for (auto& [name, communicator] : communicators) {
    if (communicator) communicator->aborted = true;
  }
  TORCH_CHECK(drained(), "strict: an abort waited for the device, which does not end");
}

void StrictGroup::shutdown() {
  bool ended = gone || drained();
  gone = true;
  TORCH_CHECK(ended, "strict: what was issued does not end");
}

bool StrictGroup::drained() {
  for (auto& [name, communicator] : communicators) {
    if (communicator) return drain(device_of(communicator->stream), bound);
  }
  return true;
}

}  // namespace sim
