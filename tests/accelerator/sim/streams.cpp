#include "streams.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace sim {
namespace {

constexpr int kDevices = 2;
constexpr size_t kPooled = 32;        // streams of a device that programs get in turn, as CUDA has them
constexpr size_t kRemembered = 4096;  // waits and violations that are kept in words

struct Kernel {
  std::string name;
  std::function<void()> run;
  bool counted;
};

struct Stream {
  int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Kernel> kernels;
  std::string running;
  bool busy = false;
  uint64_t issued = 0;
  Clock clock;
};

// Everything here is made once and never destroyed: threads of streams may still run when the program ends.
struct World {
  std::mutex mutex;  // of all that is issued
  std::deque<Stream*> streams;
  std::vector<int> unused, pool[kDevices];  // those that were given back; those that programs share
  size_t turn[kDevices] = {};
  Stream* janitor;  // frees what other streams were recorded for, so that no stream waits because of it
  Clock host;
  std::mutex notes_mutex;
  std::vector<std::string> waits, violations;
  std::string error;
  std::atomic<uint64_t> kernels{0};
  uint64_t order = 0;  // of what was issued: a number that another order would not give
  std::atomic<uint64_t> allocated{0}, allocations{0}, asked{0};
  std::atomic<double> kernel_time{0}, jitter{0}, hang_after{30};
};

World& world();

void serve(Stream* stream) {
  std::mt19937 random(std::random_device{}());
  World& all = world();
  while (true) {
    std::unique_lock<std::mutex> lock(stream->mutex);
    stream->busy = false;
    stream->running.clear();
    stream->changed.notify_all();
    stream->changed.wait(lock, [&] { return !stream->kernels.empty(); });
    Kernel kernel = std::move(stream->kernels.front());
    stream->kernels.pop_front();
    stream->busy = true;
    stream->running = kernel.name;
    lock.unlock();
    double takes = kernel.counted ? all.kernel_time.load() : 0;
    if (kernel.counted && all.jitter.load() > 0) {
      takes += std::uniform_real_distribution<double>(0, all.jitter.load())(random);
    }
    if (takes > 0) std::this_thread::sleep_for(std::chrono::duration<double>(takes));
    try {
      kernel.run();
    } catch (const std::exception& error) {
      std::string text = error.what();
      set_device_error("kernel " + kernel.name + ": " + text.substr(0, text.find("\nException raised from")));
    }
    kernel.run = nullptr;
  }
}

Stream* start(int device) {
  auto* stream = new Stream;
  stream->device = device;
  std::thread(serve, stream).detach();
  return stream;
}

World& world() {
  static World* the = new World;
  static std::once_flag once;
  std::call_once(once, [] {
    for (int device = 0; device < kDevices; ++device) the->streams.push_back(start(device));
    the->janitor = start(0);
  });
  return *the;
}

thread_local int current = 0;
thread_local std::vector<int> chosen = {0, 1};  // the default stream of device d has the number d

Stream* at(int stream) {
  World& all = world();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.streams.at(stream);
}

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t n = 0; n < other.size(); ++n) into[n] = std::max(into[n], other[n]);
}

uint64_t seen(const Clock& clock, int stream) {
  return static_cast<size_t>(stream) < clock.size() ? clock[stream] : 0;
}

void push(Stream* stream, Kernel kernel) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->kernels.push_back(std::move(kernel));
  stream->changed.notify_all();
}

void note(std::vector<std::string>& where, const std::string& text) {
  World& all = world();
  std::lock_guard<std::mutex> lock(all.notes_mutex);
  if (where.size() < kRemembered) where.push_back(text);
}

void race(const std::string& name, int stream, const Access& before, const char* what) {
  std::ostringstream text;
  text << what << ": " << name << " on stream " << stream << " is not ordered after " << before.name << " on stream "
       << before.stream;
  note(world().violations, text.str());
}

// See the note "order". The world's mutex is held.
void order(Block& block, const Use& use, const std::string& name, int stream, uint64_t number, const Clock& clock) {
  if (!use.write && !block.written && use.end > use.begin) {
    note(world().violations, "fresh memory: " + name + " reads what nobody has written");
  }
  std::vector<Access> kept;
  for (auto& before : block.accesses) {
    bool overlaps = before.begin < use.end && use.begin < before.end;
    bool ordered = seen(clock, before.stream) >= before.number;
    if (overlaps && (use.write || before.write) && !ordered) race(name, stream, before, "race");
    bool covered = use.begin <= before.begin && before.end <= use.end && ordered && (use.write || !before.write);
    if (!covered) kept.push_back(std::move(before));
  }
  kept.push_back({use.begin, use.end, stream, number, use.write, name});
  block.accesses = std::move(kept);
  block.written |= use.write;
}

}  // namespace

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int default_stream(int device) { return device; }
int device_of(int stream) { return at(stream)->device; }
int device_count() { return kDevices; }
int current_device() { return current; }
int exchange_device(int device) { return std::exchange(current, device); }
int current_stream(int device) { return chosen.at(device); }
int exchange_stream(int device, int stream) { return std::exchange(chosen.at(device), stream); }

int new_stream(int device) {
  World& all = world();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = std::find_if(all.unused.begin(), all.unused.end(), [&](int n) { return all.streams[n]->device == device; });
  if (found != all.unused.end()) {
    int stream = *found;
    all.unused.erase(found);
    return stream;
  }
  all.streams.push_back(start(device));
  return static_cast<int>(all.streams.size()) - 1;
}

void give_back(int stream) {
  World& all = world();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.unused.push_back(stream);
}

int pooled_stream(int device) {
  World& all = world();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.pool[device].size() == kPooled) return all.pool[device][all.turn[device]++ % kPooled];
  }
  int stream = new_stream(device);
  std::lock_guard<std::mutex> lock(all.mutex);
  all.pool[device].push_back(stream);
  return stream;
}

void enqueue(int stream, const std::string& name, std::function<void()> kernel, const std::vector<Use>& uses) {
  World& all = world();
  Stream* there = at(stream);
  std::lock_guard<std::mutex> lock(all.mutex);
  merge(there->clock, all.host);
  uint64_t number = ++there->issued;
  merge(there->clock, Clock(stream + 1, 0));
  there->clock[stream] = number;
  for (const auto& use : uses) order(*use.block, use, name, stream, number, there->clock);
  all.kernels++;
  all.order = all.order * 1099511628211u + std::hash<std::string>{}(name) + static_cast<uint64_t>(stream);
  push(there, {name, std::move(kernel), true});
}

HappeningPtr record(int stream) {
  World& all = world();
  Stream* there = at(stream);
  auto event = std::make_shared<Happening>();
  std::lock_guard<std::mutex> lock(all.mutex);
  merge(there->clock, all.host);
  event->clock = there->clock;
  push(there, {"event", [event] {
                 std::lock_guard<std::mutex> inner(event->mutex);
                 event->done = true;
                 event->when = now();
                 event->changed.notify_all();
               }, false});
  return event;
}

void wait_event(int stream, const HappeningPtr& event) {
  World& all = world();
  Stream* there = at(stream);
  std::lock_guard<std::mutex> lock(all.mutex);
  merge(there->clock, event->clock);
  push(there, {"a wait for an event", [event] {
                 std::unique_lock<std::mutex> inner(event->mutex);
                 event->changed.wait(inner, [&] { return event->done; });
               }, false});
}

HappeningPtr hold(int stream) {
  auto gate = std::make_shared<Happening>();
  wait_event(stream, gate);
  return gate;
}

void open(const HappeningPtr& gate) {
  std::lock_guard<std::mutex> lock(gate->mutex);
  gate->done = true;
  gate->changed.notify_all();
}

bool is_done(const HappeningPtr& event) {
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    if (!event->done) return false;
  }
  World& all = world();
  std::lock_guard<std::mutex> lock(all.mutex);
  merge(all.host, event->clock);  // the host has seen it, without waiting
  return true;
}

bool is_idle(int stream) {
  Stream* there = at(stream);
  std::lock_guard<std::mutex> lock(there->mutex);
  return there->kernels.empty() && !there->busy;
}

void count_wait(const std::string& reason) { note(world().waits, reason); }

void wait_host(const HappeningPtr& event, const std::string& reason, double bound) {
  World& all = world();
  count_wait(reason);
  double limit = bound > 0 ? bound : all.hang_after.load();
  {
    std::unique_lock<std::mutex> lock(event->mutex);
    if (!event->changed.wait_for(lock, std::chrono::duration<double>(limit), [&] { return event->done; })) {
      lock.unlock();
      std::ostringstream text;
      text << "the simulated device hangs: the host waited " << limit << " s (" << reason << "); streams stand at";
      std::lock_guard<std::mutex> outer(all.mutex);
      for (size_t n = 0; n < all.streams.size(); ++n) {
        std::lock_guard<std::mutex> inner(all.streams[n]->mutex);
        if (all.streams[n]->busy) text << " [" << n << "] " << all.streams[n]->running;
      }
      throw std::runtime_error(text.str());
    }
  }
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    merge(all.host, event->clock);
  }
  raise_device_error();
}

void wait_stream(int stream, const std::string& reason) { wait_host(record(stream), reason); }

std::vector<HappeningPtr> record_all(int device) {
  std::vector<HappeningPtr> events;
  size_t size = [] { std::lock_guard<std::mutex> lock(world().mutex); return world().streams.size(); }();
  for (size_t n = 0; n < size; ++n) {
    if (device_of(static_cast<int>(n)) == device) events.push_back(record(static_cast<int>(n)));
  }
  return events;
}

void wait_device(int device, const std::string& reason) {
  for (const auto& event : record_all(device)) wait_host(event, reason);
}

bool drain(int device, double bound) {
  double end = now() + std::min(bound, world().hang_after.load());
  for (const auto& event : record_all(device)) {
    std::unique_lock<std::mutex> lock(event->mutex);
    auto left = std::chrono::duration<double>(std::max(0.0, end - now()));
    if (!event->changed.wait_for(lock, left, [&] { return event->done; })) return false;
  }
  return true;
}

void set_device_error(const std::string& text) {
  World& all = world();
  std::lock_guard<std::mutex> lock(all.notes_mutex);
  if (all.error.empty()) all.error = text;
}

void raise_device_error() {
  World& all = world();
  std::string text;
  {
    std::lock_guard<std::mutex> lock(all.notes_mutex);
    text = std::exchange(all.error, "");
  }
  if (!text.empty()) throw std::runtime_error("error of the simulated device, found by this wait: " + text);
}

Block::~Block() { std::free(data); }

BlockPtr allocate(size_t bytes, int stream) {
  World& all = world();
  auto block = std::make_shared<Block>();
  block->data = static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64)));
  block->bytes = bytes;
  block->stream = stream;
  std::memset(block->data, 0xFF, bytes);
  all.allocations++;
  all.asked += bytes;
  all.allocated += bytes;
  return block;
}

void release(const BlockPtr& block) {
  World& all = world();
  Stream* home = at(block->stream);
  all.allocated -= block->bytes;
  std::vector<HappeningPtr> events;
  for (int stream : block->recorded) events.push_back(record(stream));
  if (!events.empty()) events.push_back(record(block->stream));
  std::lock_guard<std::mutex> lock(all.mutex);
  Clock clock = home->clock;
  merge(clock, all.host);
  for (const auto& event : events) merge(clock, event->clock);
  for (const auto& before : block->accesses) {
    if (before.stream != block->stream && seen(clock, before.stream) < before.number) {
      race("the release of its memory", block->stream, before, "use after free");
    }
  }
  push(events.empty() ? home : all.janitor, {"release", [block, events] {
                for (const auto& event : events) {
                  std::unique_lock<std::mutex> inner(event->mutex);
                  event->changed.wait(inner, [&] { return event->done; });
                }
                std::memset(block->data, 0xFF, block->bytes);
              }, false});
}

Report report() {
  World& all = world();
  std::lock_guard<std::mutex> lock(all.notes_mutex);
  return {all.waits, all.violations, all.kernels, all.order, {all.allocated, all.allocations, all.asked}};
}

void reset_report() {
  World& all = world();
  std::lock_guard<std::mutex> lock(all.notes_mutex);
  all.waits.clear();
  all.violations.clear();
  all.kernels = 0;
  all.order = 0;
  all.allocations = 0;
  all.asked = 0;
}

void set_kernel_time(double seconds, double jitter) {
  world().kernel_time = seconds;
  world().jitter = jitter;
}

void set_hang_after(double seconds) { world().hang_after = seconds; }

}  // namespace sim
