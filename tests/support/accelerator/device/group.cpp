// What a collective does on a device: a job of the communicator's stream that meets those of other
// ranks by gloo, from memory to memory. First two ranks say what they call: it has to fit.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>
#include <unistd.h>

#include "tensor.h"

namespace sim {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Texts = std::vector<std::string>;
using Ranks = std::vector<int64_t>;

constexpr int CALLS = 0, DATA = 1;  // tags of messages
constexpr int64_t LENGTH = 1024;    // of a text
constexpr char FAULT = '!';         // begins the text of a rank that has found one

struct Communicator {
  std::string fault;  // after it nothing is exchanged any more; of the stream's thread
  std::mutex mutex;
  std::condition_variable changed;
  bool is_aborted = false;
};

Communicator& communicator_of(const Group& group) {
  static std::mutex mutex;
  static auto& all = *new std::map<c10d::ProcessGroup*, Communicator*>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& found = all[group.get()];
  if (!found) found = new Communicator;
  return *found;
}

at::Tensor as_tensor(const std::string& text) {
  auto tensor = at::zeros({LENGTH}, at::kByte);
  memcpy(tensor.data_ptr(), text.data(), std::min<size_t>(text.size(), LENGTH - 1));
  return tensor;
}

// A host that waits for something else raises nothing, and ends, as by the watchdog of NCCL.
void end_unless_raised(const std::string& fault) {
  for (int i = 0; i < 200; i++) {
    if (!has_reports()) return;
    usleep(10000);
  }
  fprintf(stderr, "%s\n", fault.c_str());
  _exit(1);
}

struct Exchange {
  Group group;
  Ranks peers;
  Texts says, expects;  // by peer
  std::vector<at::Tensor> sends, takes;
  Ranks to, from;

  void run() {
    auto& communicator = communicator_of(group);
    if (!communicator.fault.empty()) return;
    try {
      const auto fault = exchange();
      if (fault.empty()) return;
      communicator.fault = fault;
      report(fault);
      // What each rank hears when it calls next.
      for (int rank = 0; rank < group->getSize(); rank++) {
        if (rank == group->getRank()) continue;
        auto text = as_tensor(FAULT + fault);
        keep(text, send(text, rank, CALLS));
      }
      end_unless_raised(fault);
    } catch (const std::exception& error) {  // a rank is gone; what NCCL runs does not end by that
      communicator.fault = error.what();
      std::unique_lock<std::mutex> lock(communicator.mutex);
      communicator.changed.wait(lock, [&] { return communicator.is_aborted; });
      report("the communicator was aborted: " + communicator.fault);
    }
  }

 private:
  // What may not have been sent yet, and is not waited for: nobody may ever hear it.
  static void keep(at::Tensor text, c10::intrusive_ptr<c10d::Work> work) {
    static auto& kept = *new std::vector<std::pair<at::Tensor, c10::intrusive_ptr<c10d::Work>>>;
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    kept.emplace_back(std::move(text), std::move(work));
  }

  // Return the fault that was found, if any; data goes between all ranks that fit.
  std::string exchange() {
    std::string fault;
    std::vector<at::Tensor> texts;
    std::vector<c10::intrusive_ptr<c10d::Work>> calls, works;
    std::set<int64_t> fits;
    const auto me = group->getRank();
    for (size_t i = 0; i < peers.size(); i++) {
      texts.push_back(as_tensor(says[i]));
      calls.push_back(send(texts.back(), peers[i], CALLS));
    }
    for (size_t i = 0; i < peers.size(); i++) {
      auto heard = as_tensor("");
      receive(heard, peers[i], CALLS)->wait();
      const std::string theirs(static_cast<const char*>(heard.data_ptr()));
      if (theirs == expects[i]) {
        fits.insert(peers[i]);
        works.push_back(calls[i]);
      } else {
        keep(texts[i], calls[i]);
        fault = theirs[0] == FAULT ? theirs.substr(1)
                                   : c10::str("ranks call what does not fit: rank ", me, " ", says[i], "; rank ",
                                              peers[i], " ", theirs);
      }
    }
    for (size_t i = 0; i < sends.size(); i++)
      if (fits.count(to[i])) works.push_back(send(sends[i], to[i], DATA));
    for (size_t i = 0; i < takes.size(); i++)
      if (fits.count(from[i])) works.push_back(receive(takes[i], from[i], DATA));
    for (auto& work : works) work->wait();
    return fault;
  }

  c10::intrusive_ptr<c10d::Work> send(at::Tensor tensor, int64_t rank, int tag) {
    std::vector<at::Tensor> one{tensor};
    return gloo().send(one, int(rank), tag);
  }
  c10::intrusive_ptr<c10d::Work> receive(at::Tensor tensor, int64_t rank, int tag) {
    std::vector<at::Tensor> one{tensor};
    return gloo().recv(one, int(rank), tag);
  }
  c10d::Backend& gloo() { return *group->getBackend(c10::DeviceType::CPU); }
};

void exchange(
    const Group& group, int64_t device, int64_t stream, Ranks peers, Texts says, Texts expects,
    std::vector<at::Tensor> sends, Ranks to, std::vector<at::Tensor> takes, Ranks from) {
  raise_reported();
  Uses uses;
  const auto place = here("a collective");
  for (auto& tensor : sends) add_use(uses, tensor, false, place), tensor = on_shadow(tensor);
  for (auto& tensor : takes) add_use(uses, tensor, true, place), tensor = on_shadow(tensor);
  auto job = std::make_shared<Exchange>(Exchange{
      group, std::move(peers), std::move(says), std::move(expects), std::move(sends), std::move(takes), std::move(to),
      std::move(from)});
  queue_of(c10::DeviceIndex(device), stream).push([job] { job->run(); }, std::move(uses));
}

void abort(const Group& group) {
  auto& communicator = communicator_of(group);
  std::lock_guard<std::mutex> lock(communicator.mutex);
  communicator.is_aborted = true;
  communicator.changed.notify_all();
}

TORCH_LIBRARY_FRAGMENT(simulated_accelerator, m) {
  m.def("exchange", &exchange);
  m.def("abort", &abort);
}

}  // namespace
}  // namespace sim
