// A device's random numbers are those of a CPU generator of its own.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace fake {

struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}
  static c10::DeviceType device_type() { return c10::kCUDA; }

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the fake GPU's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the fake GPU's generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* made = new GeneratorImpl(device().index());
    made->inner = inner.clone();
    return made;
  }

  at::Generator inner;
};

const at::Generator& default_generator(c10::DeviceIndex device);

} // namespace fake
