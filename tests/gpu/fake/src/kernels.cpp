// Kernels for the dispatch key CUDA. Device memory is host memory, so any operator is computed by the CPU's kernel on
// tensors that look at the same memory: the numbers are the CPU's, to the bit. What it returns is copied into memory of
// the device's allocator, or is a view of the argument whose memory it has.
#include "device.h"
#include "generator.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

namespace fake {
namespace {

using c10::IValue;

c10::DeviceIndex index_of(const at::Tensor& tensor) {
  return tensor.device().index();
}

// The same memory, as the CPU sees it.
at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage seen(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(seen), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  impl->set_storage_offset(tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// What a call has been given on the device, and what the CPU was given for it.
struct Given {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  c10::DeviceIndex device = -1;

  at::Tensor take(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return tensor;
    }
    device = index_of(tensor);
    pairs.emplace_back(tensor, on_cpu(tensor));
    return pairs.back().second;
  }

  // An argument that the CPU has made larger has new memory: the device's gets the same size and what is in it.
  void follow_resizes() {
    for (auto& [own, seen] : pairs) {
      if (seen.storage().data() != own.storage().data() || !seen.sizes().equals(own.sizes())) {
        own.resize_(seen.sizes());
        on_cpu(own).copy_(seen);
      }
    }
  }

  at::Tensor give_back(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) {
      return result;
    }
    for (auto& [own, seen] : pairs) {
      if (seen.is_same(result)) {
        return own;
      }
    }
    for (auto& [own, seen] : pairs) {
      if (result.has_storage() && seen.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return view_of(own, result);
      }
    }
    auto made = at::empty_strided(
        result.sizes(), result.strides(), result.options().device(c10::Device(c10::kCUDA, device)));
    on_cpu(made).copy_(result);
    return made;
  }

 private:
  static at::Tensor view_of(const at::Tensor& own, const at::Tensor& result) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(own.storage()), own.key_set(), result.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
    made.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
    return made;
  }
};

// Operators after which the host must know something that the device has computed.
const std::unordered_set<std::string>& waiting_operators() {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::equal", "aten::repeat_interleave", "aten::_linalg_check_errors"};
  return *names;
}

bool takes_host_tensors(const std::string& name) {
  return name == "aten::index" || name == "aten::_index_put_impl_" || name == "aten::index_put_";
}

// Views of memory are no kernels: nothing is launched for them.
bool is_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) {
    return false;
  }
  const auto* alias = schema.returns()[0].alias_info();
  return alias && !alias->isWrite();
}

bool waits(const std::string& name, const std::vector<IValue>& arguments) {
  if (waiting_operators().count(name)) {
    return true;
  }
  if (name != "aten::_index_put_impl_") {
    return false;
  }
  for (const auto& one : arguments[1].toListRef()) {  // a mask is turned into indices, whose number the host must know
    if (one.isTensor() && one.toTensor().defined() &&
        (one.toTensor().scalar_type() == at::kBool || one.toTensor().scalar_type() == at::kByte)) {
      return true;
    }
  }
  return false;
}

void check_device(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK(
      !tensor.defined() || !tensor.device().is_cpu() || tensor.dim() == 0 || takes_host_tensors(name),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when calling ",
      name, ")");
}

IValue translate(const IValue& value, Given& given, const std::string& name, bool& has_generator) {
  if (value.isTensor()) {
    check_device(value.toTensor(), name);
    return given.take(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> seen;
    for (const at::Tensor& one : value.toTensorList()) {
      check_device(one, name);
      seen.push_back(given.take(one));
    }
    return seen;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> seen;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList()) {
      seen.push_back(one ? std::optional<at::Tensor>(given.take(*one)) : one);
    }
    return seen;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) {
    given.device = value.toDevice().index() < 0 ? current_device() : value.toDevice().index();
    return c10::Device(c10::kCPU);
  }
  if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
    has_generator = true;
    return value.toGenerator().get<GeneratorImpl>()->inner;
  }
  return value;
}

IValue give_back(const IValue& value, Given& given) {
  if (value.isTensor()) {
    return given.give_back(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& one : value.toTensorList()) {
      made.push_back(given.give_back(one));
    }
    return made;
  }
  return value;
}

// An operator that draws without being given a generator draws from the CPU's: that is lent the device's state.
struct LentState {
  LentState(c10::DeviceIndex device, bool needed) : needed(needed), device(device) {
    if (needed) {
      kept = cpu.get_state();
      cpu.set_state(default_generator(device).get_state());
    }
  }
  ~LentState() {
    if (needed) {
      auto own = default_generator(device);
      own.set_state(cpu.get_state());
      cpu.set_state(kept);
    }
  }
  bool needed;
  c10::DeviceIndex device;
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Tensor kept;
};

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  Given given;
  bool has_generator = false;
  const auto count = schema.arguments().size();
  auto arguments = torch::jit::pop(*stack, count);
  const bool host_waits = waits(name, arguments);
  for (const auto& argument : arguments) {
    torch::jit::push(*stack, translate(argument, given, name, has_generator));
  }
  given.device = given.device < 0 ? current_device() : given.device;
  {
    const bool draws = op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator;
    LentState lent(given.device, draws);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (!is_view(schema)) {
    launch(given.device);
    given.follow_resizes();
  }
  if (host_waits) {
    implicit_wait(given.device, name.substr(name.find("::") + 2));
  }
  auto results = torch::jit::pop(*stack, schema.returns().size());
  for (const auto& result : results) {
    torch::jit::push(*stack, give_back(result, given));
  }
}

at::Tensor make_empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(at::Device(c10::kCUDA, current_device())));
  return at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor make_empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(at::Device(c10::kCUDA, current_device())));
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// What cudaMemcpyAsync makes of a copy, by "API synchronization behavior" of the CUDA runtime: one between pageable
// host memory and the device has the host wait, `non_blocking` or not.
void count_copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const auto device = index_of(to.is_cuda() ? to : from);
  launch(device);
  if (to.is_cuda() && from.is_cuda()) {
    return counts().add("copy:device-to-device");
  }
  const auto& host = to.is_cuda() ? from : to;
  const bool pinned = is_pinned(host.storage().data()), waits = !non_blocking || !pinned;
  const std::string way = to.is_cuda() ? "host-to-device" : "device-to-host";
  counts().add("copy:" + way + (pinned ? ":pinned" : ":pageable") + (waits ? ":synchronous" : ":asynchronous"));
  if (waits) {
    implicit_wait(device, "copy");
  }
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(source)) {
    return self;
  }
  count_copy(self, source, non_blocking);
  const auto from = source.is_cuda() ? on_cpu(source) : source;
  if (self.is_cuda()) {
    on_cpu(self).copy_(from);
  } else {
    self.copy_(from);
  }
  return self;
}

at::Scalar read_scalar(const at::Tensor& self) {
  implicit_wait(index_of(self), "item");
  return at::_local_scalar_dense(on_cpu(self));
}

void grow(c10::StorageImpl* storage, size_t bytes) {
  if (bytes <= storage->nbytes()) {
    return;
  }
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  auto data = device_allocator()->allocate(bytes);
  std::memcpy(data.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const c10::DeviceGuard guard(self.device());
  impl->set_sizes_contiguous(sizes);
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  grow(impl->unsafe_storage().unsafeGetStorageImpl(), (self.storage_offset() + self.numel()) * self.itemsize());
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  strides.empty() && !sizes.empty() ? impl->set_sizes_contiguous(sizes) : impl->set_sizes_and_strides(sizes, strides);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, at::empty({0}, self.options()).storage(), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// Attention by its formula: the fused kernels are a GPU's own.
int64_t choose_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

} // namespace
} // namespace fake

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &fake::choose_attention)
} // namespace at::native

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::compute>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &fake::make_empty);
  m.impl("empty_strided", &fake::make_empty_strided);
  m.impl("copy_", &fake::copy);
  m.impl("_local_scalar_dense", &fake::read_scalar);
  m.impl("resize_", &fake::resize);
  m.impl("set_.source_Storage_storage_offset", &fake::set_storage);
  m.impl("set_.source_Storage", &fake::set_whole_storage);
  m.impl("set_.source_Tensor", &fake::set_tensor);
  m.impl("set_", &fake::set_nothing);
  m.impl("record_stream", &fake::record_stream);
  // These choose a library by the device: as a whole they are the CPU's.
  for (const auto* name : {"convolution", "convolution_backward", "_convolution"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fake::compute>());
  }
}
