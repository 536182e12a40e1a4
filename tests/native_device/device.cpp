// A device for tests: torch's PrivateUse1 slot, host memory, CPU kernels.
//
// To torch it is as foreign as any vendor's accelerator: tensors on it are not CPU tensors, code that assumes CUDA or
// mixes it with the CPU fails. Its arithmetic is the CPU's, so results on it must equal the CPU's to the last bit.

#include <ATen/core/Tensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace {

constexpr c10::DeviceType kOurs = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kOurs, 0);

// ---- memory: the host's, under another name ---------------------------------------------------------------------------

struct HostMemory final : c10::Allocator {
  static void release(void* memory) { std::free(memory); }

  c10::DataPtr allocate(size_t bytes) override {
    // Aligned as torch aligns the CPU's: matrix products add up in an order that depends on it.
    void* memory = bytes == 0 ? nullptr : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return {memory, memory, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

HostMemory memory;
REGISTER_ALLOCATOR(kOurs, &memory);

// ---- one device, one stream, nothing ever in flight -------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }

  c10::DeviceType type() const override { return kOurs; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  // Sharding gives the memory of gathered parameters back, and takes it again.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr fresh = memory.allocate(bytes);
    if (bytes != 0 && storage.nbytes() != 0) {
      std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  // The CPU's stream of random numbers, so that dropout drops what it drops on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator shared = at::detail::getDefaultCPUGenerator();
    return shared;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

Hooks hooks;

// ---- the few operations a device has to bring itself ------------------------------------------------------------------

at::Tensor seen_by_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, tensor.options().device(at::kCPU));
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  seen_by_cpu(target).copy_(seen_by_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (!source.sizes().equals(target.sizes())) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar number_in(const at::Tensor& tensor) { return seen_by_cpu(tensor).item(); }

at::Tensor as_strided(
    const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(tensor, size, stride, offset);
}

at::Tensor& set_storage(
    at::Tensor& result, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(result, storage, offset, size, stride);
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number_in);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_", at::native::set_cpu_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  // Torch has formulas for these, for devices without a kernel, which add up in another order than the CPU's kernels.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward", "silu_backward", "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
