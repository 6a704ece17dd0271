// A device of tests: memory of the host under torch's PrivateUse1, computed by the CPU kernels.
//
// A boxed fallback makes CPU tensors of the same memory, calls the CPU kernel, and gives new memory to the device. Kernels
// run at once on the calling thread, so streams and events order nothing here.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};
std::atomic<c10::StreamId> streams_made{0};
std::atomic<int64_t> kernels{0}, host_reads{0}, allocated{0}, copies_between{0}, pinned_copies{0};

c10::Device with_index(c10::Device device) {
  return device.has_index() ? device : c10::Device(kDevice, current_device);
}

// ---- Memory

struct Block {
  c10::DataPtr memory;
  int64_t size;
};

struct DeviceAllocator final : c10::Allocator {
  static c10::DataPtr take(c10::DataPtr memory, size_t size, c10::DeviceIndex index) {
    allocated += size;
    void* address = memory.get();
    auto* block = new Block{std::move(memory), static_cast<int64_t>(size)};
    return {address, block, &release, c10::Device(kDevice, index)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= block->size;
    delete block;
  }
  c10::DataPtr allocate(size_t size) override {
    return take(c10::GetCPUAllocator()->allocate(size), size, current_device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} device_allocator;

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

struct PinnedAllocator final : c10::Allocator {
  static void release(void* address) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(static_cast<const char*>(address));
    std::free(address);
  }
  c10::DataPtr allocate(size_t size) override {
    void* address = std::malloc(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<const char*>(address)] = std::max<size_t>(size, 1);
    return {address, address, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_allocator;

// ---- Random numbers

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex each = 0; each < kDevices; ++each) made.push_back(at::make_generator<DeviceGenerator>(each));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

// ---- Devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    device = with_index(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, with_index(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), ++streams_made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<std::chrono::steady_clock::time_point*>(event);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::chrono::steady_clock::time_point;
    *static_cast<std::chrono::steady_clock::time_point*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    using Point = std::chrono::steady_clock::time_point;
    return std::chrono::duration<double, std::milli>(*static_cast<Point*>(second) - *static_cast<Point*>(first)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kDevice, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kDevice, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    auto before = current_device;
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, current_device}; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = device_allocator.allocate(size);
    if (auto kept = std::min(size, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---- Kernels

at::Tensor tensor_of(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// CPU tensors of the device's memory for one call of a kernel. Tensors that share memory share it on the CPU too.
class Aliases {
 public:
  at::Tensor on_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
    index_ = tensor.device().index();
    auto* own = tensor.storage().unsafeGetStorageImpl();
    auto& alias = cpu_[own];
    if (!alias) {
      c10::DataPtr memory(own->mutable_data(), c10::kCPU);
      alias = c10::Storage(
          c10::make_intrusive<c10::StorageImpl>(
              c10::StorageImpl::use_byte_size_t(), own->nbytes(), std::move(memory), c10::GetCPUAllocator(), true));
      device_.emplace(alias.unsafeGetStorageImpl(), tensor.storage());
    }
    return tensor_of(alias, tensor, c10::DispatchKey::CPU);
  }
  // Take over what a kernel did to the sizes and memory of an argument.
  void update(const at::Tensor& tensor, const at::Tensor& alias) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return;
    auto* memory = alias.storage().unsafeGetStorageImpl();
    auto* own = tensor.storage().unsafeGetStorageImpl();
    if (memory->data() != own->data()) {
      own->set_nbytes(memory->nbytes());
      own->set_data_ptr_noswap(moved(memory, tensor.device().index()));
    }
    if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides())
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
  at::Tensor on_device(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    auto* memory = result.storage().unsafeGetStorageImpl();
    auto& storage = device_[memory];
    if (!storage) {
      kept_.push_back(result);  // its address is the key
      auto size = memory->nbytes();
      storage = c10::Storage(
          c10::make_intrusive<c10::StorageImpl>(
              c10::StorageImpl::use_byte_size_t(), size, moved(memory, index_ < 0 ? current_device : index_),
              &device_allocator, true));
    }
    return tensor_of(storage, result, c10::DispatchKey::PrivateUse1);
  }

 private:
  static c10::DataPtr moved(c10::StorageImpl* memory, c10::DeviceIndex index) {
    c10::DataPtr left(memory->mutable_data(), c10::kCPU);
    auto size = memory->nbytes();
    return DeviceAllocator::take(memory->set_data_ptr(std::move(left)), size, index);
  }
  c10::DeviceIndex index_ = -1;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_, device_;
  std::vector<at::Tensor> kept_;
};

bool may_mix(const std::string& name) {  // as on CUDA: indices may be on the host
  return name.find("index") != std::string::npos || name.find("record_stream") != std::string::npos;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++kernels;
  const auto& schema = op.schema();
  if (schema.name() == "aten::_local_scalar_dense") ++host_reads;
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  Aliases aliases;
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  at::Generator generator, twin;
  auto alias = [&](const at::Tensor& tensor, bool writes) {
    TORCH_CHECK(
        !tensor.defined() || tensor.device().type() == kDevice || tensor.dim() == 0 || may_mix(schema.name()),
        "Expected all tensors to be on the same device, but one given to ", schema.name(), " is on ", tensor.device());
    auto made = aliases.on_cpu(tensor);
    if (writes) written.emplace_back(tensor, made);
    return made;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    const auto* info = schema.arguments()[i].alias_info();
    const bool writes = info != nullptr && info->isWrite();
    if (value.isTensor()) {
      value = alias(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& each : value.toTensorVector()) made.push_back(alias(each, writes));
      value = c10::List<at::Tensor>(made);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
        made.push_back(each ? std::optional<at::Tensor>(alias(*each, writes)) : std::nullopt);
      value = made;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) {
      generator = value.isGenerator() ? value.toGenerator() : default_generator(-1);
      if (generator.device().type() == kDevice) {
        twin = at::make_generator<at::CPUGeneratorImpl>();
        twin.set_state(generator.get_state());
        value = twin;
      }
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(stack);
  }
  if (twin.defined()) generator.set_state(twin.get_state());
  for (auto& [tensor, made] : written) aliases.update(tensor, made);
  const auto results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[stack->size() - results + i];
    const auto* info = schema.returns()[i].alias_info();
    if (info != nullptr && info->isWrite()) {  // an argument
      for (size_t j = 0; j < count; ++j) {
        const auto* argument = schema.arguments()[j].alias_info();
        if (argument != nullptr && *argument == *info) value = given[j];
      }
    } else if (value.isTensor()) {
      value = aliases.on_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& each : value.toTensorVector()) made.push_back(aliases.on_device(each));
      value = c10::List<at::Tensor>(made);
    }
  }
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(with_index(device.value_or(c10::Device(kDevice))));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(with_index(device.value_or(c10::Device(kDevice))));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  ++kernels;
  if (from.device().type() != to.device().type()) {
    ++copies_between;
    const auto& host = from.device().is_cpu() ? from : to;
    if (is_pinned(host.const_data_ptr())) ++pinned_copies;
  }
  Aliases aliases;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  aliases.on_cpu(to).copy_(aliases.on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.size() != size.size()) {
    strides.assign(size.size(), 1);
    for (auto i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i) strides[i] = strides[i + 1] * size[i + 1];
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(
      self,
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true)),
      0, {0}, {});
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // If composed of other operators, the first four allocate a result of another size, and the last compute other bits.
  for (const char* name : {"mse_loss", "smooth_l1_loss", "huber_loss", "nll_loss_forward", "native_layer_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("record_stream", record_stream);
}

// ---- Collectives, by gloo on the memory that the device has

class DeviceGroup final : public c10d::Backend {
 public:
  DeviceGroup(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  using W = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  const std::string getBackendName() const override { return "simulated_gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  W broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto on = all(tensors);
    return gloo_->broadcast(on, options);
  }
  W allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto on = all(tensors);
    return gloo_->allreduce(on, options);
  }
  W reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto on = all(tensors);
    return gloo_->reduce(on, options);
  }
  W allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = nested(outputs);
    auto from = all(inputs);
    return gloo_->allgather(to, from, options);
  }
  W _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = one(output), from = one(input);
    return gloo_->_allgather_base(to, from, options);
  }
  W allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = all(outputs), from = all(inputs);
    return gloo_->allgather_into_tensor_coalesced(to, from, options);
  }
  W gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = nested(outputs);
    auto from = all(inputs);
    return gloo_->gather(to, from, options);
  }
  W scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto from = nested(inputs);
    auto to = all(outputs);
    return gloo_->scatter(to, from, options);
  }
  W reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto from = nested(inputs);
    auto to = all(outputs);
    return gloo_->reduce_scatter(to, from, options);
  }
  W _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = one(output), from = one(input);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  W reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = all(outputs), from = all(inputs);
    return gloo_->reduce_scatter_tensor_coalesced(to, from, options);
  }
  W alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = one(output), from = one(input);
    return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
  }
  W send(Tensors& tensors, int rank, int tag) override {
    auto on = all(tensors);
    return gloo_->send(on, rank, tag);
  }
  W recv(Tensors& tensors, int rank, int tag) override {
    auto on = all(tensors);
    return gloo_->recv(on, rank, tag);
  }
  W barrier(const c10d::BarrierOptions&) override { return gloo_->barrier({}); }

 private:
  // The tensor owns the device's memory, so that it lives until the collective is done.
  static at::Tensor one(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kDevice, "this backend is for tensors of its device");
    auto storage = tensor.storage();
    auto* keep = new c10::Storage(storage);
    c10::DataPtr memory(
        storage.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::kCPU);
    return tensor_of(
        c10::Storage(c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(memory), nullptr, false)),
        tensor, c10::DispatchKey::CPU);
  }
  static Tensors all(const Tensors& tensors) {
    Tensors made;
    for (const auto& each : tensors) made.push_back(one(each));
    return made;
  }
  static std::vector<Tensors> nested(const std::vector<Tensors>& lists) {
    std::vector<Tensors> made;
    for (const auto& each : lists) made.push_back(all(each));
    return made;
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kDevice, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  module.def("device_count", [] { return static_cast<int>(kDevices); });
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int index) { Guard().setDevice({kDevice, static_cast<c10::DeviceIndex>(index)}); });
  module.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  module.def("memory_allocated", [] { return allocated.load(); });
  module.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"kernels", kernels},
        {"host_reads", host_reads},
        {"copies_between", copies_between},
        {"pinned_copies", pinned_copies},
        {"streams", streams_made}};
  });
  module.def("device_group", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<DeviceGroup>(gloo);
  });
}
