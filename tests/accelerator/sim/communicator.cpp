// Communicators over sockets of one host.
#include "group.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <thread>

namespace sim {
namespace {

std::mutex made_mutex;
std::vector<std::string>& made() {
  static auto* all = new std::vector<std::string>;
  return *all;
}

struct Hello {
  int rank;
  int toward_listener;
};

std::pair<sockaddr_un, socklen_t> address(const std::string& name) {
  sockaddr_un found{};
  found.sun_family = AF_UNIX;
  TORCH_CHECK(name.size() + 1 < sizeof(found.sun_path), "too long a name for a socket: ", name);
  std::memcpy(found.sun_path, name.data(), name.size());  // a file, which other network namespaces see too
  return {found, static_cast<socklen_t>(sizeof found)};
}

std::string fresh_name() {
  static std::atomic<int> number{0};
  return "/tmp/penstock-sim-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

}  // namespace

std::vector<std::string> communicators_made() {
  std::lock_guard<std::mutex> lock(made_mutex);
  return made();
}

void forget_communicators() {
  std::lock_guard<std::mutex> lock(made_mutex);
  made().clear();
}

Communicator::Communicator(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size, double bound)
    : name(name), rank(rank), size(size), stream(new_stream(current_device())), store(store), bound(bound), to(size, -1), from(size, -1) {
  auto key = [&](int who) { return name + "/" + std::to_string(who); };
  auto mine = fresh_name();
  int door = socket(AF_UNIX, SOCK_STREAM, 0);
  auto [here, length] = address(mine);
  unlink(mine.c_str());  // of a process that was killed, whose number is this one's now
  TORCH_CHECK(bind(door, reinterpret_cast<sockaddr*>(&here), length) == 0 && listen(door, 2 * size) == 0, "cannot listen");
  store->set(key(rank), std::vector<uint8_t>(mine.begin(), mine.end()));
  auto limit = std::chrono::milliseconds(static_cast<int64_t>(bound * 1e3));
  for (int peer = 0; peer < rank; ++peer) {
    store->wait({key(peer)}, limit);
    auto where = store->get(key(peer));
    auto [there, there_length] = address({where.begin(), where.end()});
    for (int toward : {1, 0}) {
      int fd = socket(AF_UNIX, SOCK_STREAM, 0);
      TORCH_CHECK(connect(fd, reinterpret_cast<sockaddr*>(&there), there_length) == 0, "rank ", peer, " has left while communicator ", name, " was made");
      Hello hello{rank, toward};
      TORCH_CHECK(::write(fd, &hello, sizeof hello) == sizeof hello, "cannot greet rank ", peer);
      (toward ? to : from)[peer] = fd;
    }
  }
  for (int expected = 2 * (size - 1 - rank); expected > 0; --expected) {
    pollfd waiting{door, POLLIN, 0};
    TORCH_CHECK(poll(&waiting, 1, static_cast<int>(limit.count())) == 1, "communicator ", name, ": not all of ", size, " ranks have joined in ", bound, " s");
    int fd = accept(door, nullptr, nullptr);
    Hello hello{};
    TORCH_CHECK(::read(fd, &hello, sizeof hello) == sizeof hello, "a rank left while communicator ", name, " was made");
    (hello.toward_listener ? from : to)[hello.rank] = fd;
  }
  close(door);
  unlink(mine.c_str());
  std::lock_guard<std::mutex> lock(made_mutex);
  made().push_back(name);
}

// When nobody uses it and none of its messages is on its way any more. Peers notice nothing: see `write_all`.
Communicator::~Communicator() {
  for (const auto& ends : {to, from}) {
    for (int fd : ends) {
      if (fd >= 0) close(fd);
    }
  }
  give_back(stream);
}

std::string Communicator::first(int who, int peer, bool sends) const {
  return name + "/first/" + std::to_string(sends ? who : peer) + ">" + std::to_string(sends ? peer : who) + "/" + std::to_string(who);
}

void Communicator::arrive(int peer, bool sends) {
  if (!connected.count({peer, sends})) store->set(first(rank, peer, sends), std::vector<uint8_t>{1});
}

void Communicator::meet(int peer, bool sends) {
  if (!connected.insert({peer, sends}).second) return;
  count_wait("the first message " + std::string(sends ? "to" : "from") + " a rank");
  for (double end = now() + bound; !store->check({first(peer, rank, !sends)});) {
    TORCH_CHECK(!aborted, "communicator ", name, " was aborted");
    TORCH_CHECK(now() < end, "communicator ", name, ": rank ", peer, " has not posted the other side of the first message in ", bound, " s");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A peer that is gone looks like one that is slow: only an abort ends the wait.
void Communicator::write_all(int fd, const char* data, size_t bytes) {
  while (bytes > 0) {
    TORCH_CHECK(!aborted, "communicator ", name, " was aborted");
    pollfd ready{fd, POLLOUT, 0};
    if (poll(&ready, 1, 20) != 1) continue;
    auto done = ::send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done > 0) data += done, bytes -= done;
    else std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void Communicator::read_all(int fd, char* data, size_t bytes) {
  while (bytes > 0) {
    TORCH_CHECK(!aborted, "communicator ", name, " was aborted");
    pollfd ready{fd, POLLIN, 0};
    if (poll(&ready, 1, 20) != 1) continue;
    auto done = ::recv(fd, data, bytes, MSG_DONTWAIT);
    if (done > 0) data += done, bytes -= done;
    else std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void Communicator::send(int peer, const char* data, size_t bytes) {
  uint64_t size = bytes;
  char taken = 0;
  write_all(to[peer], reinterpret_cast<const char*>(&size), sizeof size);
  write_all(to[peer], data, bytes);
  read_all(to[peer], &taken, 1);  // the receive runs
}

void Communicator::receive(int peer, char* data, size_t bytes) {
  uint64_t size = 0;
  char taken = 1;
  read_all(from[peer], reinterpret_cast<char*>(&size), sizeof size);
  TORCH_CHECK(size == bytes, "communicator ", name, ": a message of ", size, " bytes was received as one of ", bytes);
  write_all(from[peer], &taken, 1);
  read_all(from[peer], data, bytes);
}

std::vector<std::vector<char>> Communicator::exchange(const char* data, size_t bytes) {
  std::vector<std::vector<char>> all(size, std::vector<char>(bytes));
  std::string wrong;
  std::thread sender([&] {
    try {
      uint64_t length = bytes;
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        write_all(to[peer], reinterpret_cast<const char*>(&length), sizeof length);
        write_all(to[peer], data, bytes);
      }
    } catch (const std::exception& error) {
      wrong = error.what();
    }
  });
  try {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) {
        std::memcpy(all[peer].data(), data, bytes);
        continue;
      }
      uint64_t length = 0;
      read_all(from[peer], reinterpret_cast<char*>(&length), sizeof length);
      all[peer].resize(length);
      read_all(from[peer], all[peer].data(), length);
    }
  } catch (const std::exception& error) {
    wrong = error.what();
  }
  sender.join();
  TORCH_CHECK(wrong.empty(), wrong);
  return all;
}

}  // namespace sim
