// A process group that keeps the rules of ProcessGroupNCCL, and none of gloo's kindness.
//
// - A communicator has one stream. What it is given runs there, one after another, in the order of issue.
// - Without a bound device ("lazy"), the first unbatched send or receive between two ranks makes a communicator of the
//   two, and the host waits until the other joins. Collectives and batches make one of the whole group, likewise.
// - With a bound device ("eager"), there is one communicator for the group, made at once, for everything.
// - The first message from one rank to another on a communicator connects them: the host waits until the other has posted
//   its side. In a batch all new connections are made at once.
// - A send is done when its receive runs. A batch runs as one, without order inside.
// - wait() makes the current stream wait, not the host, unless it is given a bound.
// - A peer that is gone is not noticed: whoever waits for it waits until the communicator is aborted.
// - What happens when a communicator fails is read from the environment when it is made, as NCCL's watchdog does: to end
//   the process (3), or to abort the communicator (2). The simulated ones only remember it.
// - To abort frees memory of the device, which waits for all that runs there, also on communicators that were not aborted.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <map>

#include "device.h"

namespace sim {

class Communicator {
 public:
  // Blocks the host until all ranks have joined under this name, or `bound` is over.
  Communicator(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size, double bound);
  ~Communicator();

  void send(int peer, const char* data, size_t bytes);  // these three are called by kernels
  void receive(int peer, char* data, size_t bytes);
  std::vector<std::vector<char>> exchange(const char* data, size_t bytes);  // what each rank gave
  void arrive(int peer, bool sends);  // the host posts its first message to, or from, this peer
  void meet(int peer, bool sends);    // and waits for the other side of it

  const std::string name;
  const int rank, size, stream;
  std::atomic<bool> aborted{false};

 private:
  std::string first(int who, int peer, bool sends) const;
  const c10::intrusive_ptr<c10d::Store> store;
  const double bound;
  std::set<std::pair<int, bool>> connected;
  void write_all(int fd, const char* data, size_t bytes);
  void read_all(int fd, char* data, size_t bytes);
  std::vector<int> to, from;  // by rank: two sockets to each peer, one for each direction
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

class StrictWork : public c10d::Work {
 public:
  StrictWork(c10d::OpType type, int rank, HappeningPtr end, std::vector<at::Tensor> kept, c10::Device device, CommunicatorPtr on);
  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds bound = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  HappeningPtr end;
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> results;
  c10::Device device;
  CommunicatorPtr on;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct Config {
  int min_ctas = 0;
};

class StrictGroup : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    Options() : c10d::Backend::Options("strict") {}
    bool is_high_priority_stream = false;
    Config config;
  };
  StrictGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  const std::string getBackendName() const override { return "strict"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void eagerConnectSingleDevice(at::Device device) override;
  void meet(const std::string& name, int count);  // all `count` callers under this name go on together
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  void abort() override;
  const int error_handling;
  void shutdown() override;  // when what was issued has run

 private:
  struct Message {
    at::Tensor tensor;
    int peer;
    bool sends;
  };
  CommunicatorPtr communicator(const std::string& name, int rank, int size);
  CommunicatorPtr whole();
  bool drained();  // whether all that runs on the device has ended within the bound
  CommunicatorPtr with(int peer);
  c10::intrusive_ptr<c10d::Work> point_to_point(std::vector<at::Tensor>& tensors, int peer, bool sends);
  c10::intrusive_ptr<c10d::Work> issue(const CommunicatorPtr& on, c10d::OpType type, const std::string& name, std::function<void()> kernel,
                                       const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes);
  c10::intrusive_ptr<c10d::Work> reduce(const at::Tensor& input, const at::Tensor& output, c10d::ReduceOp op, c10d::OpType type, bool scatter);
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<Options> options;
  double bound;
  bool eager = false, gone = false;
  std::map<std::string, CommunicatorPtr> communicators;
  std::optional<std::vector<Message>> batch;
  c10::intrusive_ptr<c10d::Work> last;  // of collectives that were issued while coalescing
};

std::vector<std::string> communicators_made();  // by this process, of all groups
void forget_communicators();

}  // namespace sim
