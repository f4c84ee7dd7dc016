#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

namespace sim {
namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  Generator(c10::DeviceIndex device, at::Generator cpu)
      : c10::GeneratorImpl(c10::Device(TYPE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { settled()->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { settled()->set_offset(offset); }
  uint64_t get_offset() const override { return settled()->get_offset(); }
  uint64_t current_seed() const override { return settled()->current_seed(); }
  uint64_t seed() override { return settled()->seed(); }
  void set_state(const c10::TensorImpl& state) override { settled()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return settled()->get_state(); }
  Generator* clone_impl() const override {
    settled();
    return new Generator(device().index(), cpu.clone());
  }

  // The state is known when all draws are done. No clock learns of it: a GPU's state is on the host.
  c10::GeneratorImpl* settled() const {
    MarkPtr until;
    {
      std::lock_guard<std::mutex> lock(mutex);
      until = last;
    }
    if (until) until->wait();
    return cpu.unsafeGetGeneratorImpl();
  }

  at::Generator cpu;
  mutable std::mutex mutex;
  MarkPtr last;  // of the draws
};

Generator& of(const at::Generator& generator) {
  return *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
}

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < DEVICES; index++) made->push_back(new_generator(c10::DeviceIndex(index)));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator inner(const at::Generator& generator) { return of(generator).cpu; }

void settle(const at::Generator& generator) { of(generator).settled(); }

void drawing(const at::Generator& generator, Queue& queue) {
  auto& own = of(generator);
  std::lock_guard<std::mutex> lock(own.mutex);
  if (own.last) queue.prepend([last = own.last] { last->wait(); });
}

void drawn(const at::Generator& generator, Queue& queue) {
  auto& own = of(generator);
  auto mark = queue.mark();
  std::lock_guard<std::mutex> lock(own.mutex);
  own.last = std::move(mark);
}

}  // namespace sim
