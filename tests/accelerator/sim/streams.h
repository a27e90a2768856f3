// A simulated accelerator: streams, events, memory, and what it notices about the program that uses it.
//
// A kernel is a function that a stream's own thread runs later. The host only issues. Everything that makes the host wait
// is counted, with its reason. Memory is ordinary memory, filled with 0xFF when it is new and when it is freed: NaN in
// every floating type, -1 in every integer.
//
// Note "order". Whether two accesses are ordered is decided when they are issued, by vector clocks, and not by how the
// threads happen to run: each stream knows how much of every other stream lies before it (through events), the host how
// much of every stream it has waited for. An access that is not ordered after an earlier one to the same bytes, where one
// of them writes, is a race, and is noted even if it did no harm this time. Freeing is an access too: memory goes back to
// the stream that it was made on, and whoever uses it on another stream must have been waited for, or be recorded.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // by stream: how many of its kernels lie before

struct Access {
  size_t begin, end;  // bytes
  int stream;
  uint64_t number;
  bool write;
  std::string name;
};

struct Block {
  char* data = nullptr;
  size_t bytes = 0;
  int stream = 0;          // that it was made on
  bool written = false;    // whether anything was ever written to it
  std::set<int> recorded;  // streams named by record_stream
  std::vector<Access> accesses;
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;

struct Use {
  BlockPtr block;
  size_t begin, end;
  bool write;
};

struct Happening {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  double when = 0;  // seconds
  Clock clock;
};
using HappeningPtr = std::shared_ptr<Happening>;

// streams; a number for each, over all devices
int default_stream(int device);
int new_stream(int device);     // for one communicator
void give_back(int stream);     // which another may have when it is done
int pooled_stream(int device);  // of a few that programs share
int device_of(int stream);
int current_stream(int device);
int exchange_stream(int device, int stream);
int device_count();
int current_device();
int exchange_device(int device);

// issuing
void enqueue(int stream, const std::string& name, std::function<void()> kernel, const std::vector<Use>& uses = {});
HappeningPtr record(int stream);
void wait_event(int stream, const HappeningPtr& event);
bool is_done(const HappeningPtr& event);
HappeningPtr hold(int stream);  // what is issued there from now on waits until the host opens this
void open(const HappeningPtr& gate);
bool is_idle(int stream);

// the host waits
void count_wait(const std::string& reason);
void wait_host(const HappeningPtr& event, const std::string& reason, double bound = 0);
void wait_stream(int stream, const std::string& reason);
void wait_device(int device, const std::string& reason);
bool drain(int device, double bound);  // whether all that was issued has run by then; this is not counted
void raise_device_error();
void set_device_error(const std::string& text);

// memory
BlockPtr allocate(size_t bytes, int stream);
void release(const BlockPtr& block);

struct Memory {
  uint64_t allocated;           // bytes that are held now
  uint64_t allocations, asked;  // since the last reset: how often memory was asked for, and bytes of all that was asked for
};
struct Report {  // what a test asks for
  std::vector<std::string> waits, violations;
  uint64_t kernels, order;  // how many were issued, and a number for their names, streams and order
  Memory memory;
};
Report report();
void reset_report();
void set_kernel_time(double seconds, double jitter);  // that every kernel takes besides its work
void set_hang_after(double seconds);
double now();

}  // namespace sim
