// What torch asks of a kind of device, and the switches for tests.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/library.h>

#include "generator.h"
#include "kernel.h"
#include "pinned.h"
#include "tensor.h"

namespace sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current_device();
    set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  at::Device getDeviceFromPtr(void* address) const override { return c10::Device(TYPE, device_of(address)); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow(storage.unsafeGetStorageImpl(), bytes);
  }
};

// An operator can hand a generator to Python; its schema has to say that there may be none.
std::optional<at::Generator> generator(int64_t device) { return default_generator(c10::DeviceIndex(device)); }
TORCH_LIBRARY(simulated_accelerator, m) { m.def("generator(int device) -> Generator?", &generator); }

}  // namespace
}  // namespace sim

extern "C" {

void sim_register() {
  sim::take_the_cpus_kernels();
  c10::register_privateuse1_backend("sim");
  c10::SetAllocator(sim::TYPE, sim::allocator());
  at::setHostAllocator(sim::TYPE, sim::pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
}
int sim_device_count() { return sim::DEVICES; }
int sim_is_forked() { return sim::is_forked(); }
void sim_set_delays(double share, int microseconds, unsigned seed) { sim::set_delays(share, microseconds, seed); }
void sim_set_limit(int device, long bytes) {
  sim::set_limit(c10::DeviceIndex(device), bytes < 0 ? sim::capacity() : size_t(bytes));
}
void sim_set_fraction(int device, double fraction) { sim::set_fraction(c10::DeviceIndex(device), fraction); }
double sim_fraction(int device) { return sim::fraction(c10::DeviceIndex(device)); }
unsigned long sim_faults() { return sim::faults(); }
unsigned long sim_calls_late() { return sim::counts().late; }
unsigned long sim_calls_in_step() { return sim::counts().in_step; }

}  // extern "C"
