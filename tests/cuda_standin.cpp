// A CUDA device in CPU memory, for torch's CPU build. Its tensors are real ones that say cuda:N; every operator on them
// runs on the CPU, on the same memory. What lives on the device is counted by storage, as CUDA's allocator would.
// Without values (see `values`) floating point tensors have a size only: operators on them run on torch's meta device.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <vector>

using namespace c10;
using at::Tensor;

namespace {

int devices = 1, major_capability = 9;
bool values = true;
thread_local DeviceIndex current = 0;
void (*told)(const char* what, const char* which) = nullptr;  // hears of waits, attention kernels, ...
int (*label_of)(int64_t bytes) = nullptr;                     // asked at every allocation: whose is it?

void tell(const char* what, const std::string& which) {
  if (told) told(what, which.c_str());
}

// ---- memory

struct Ledger {
  std::mutex mutex;
  int64_t live = 0, peak = 0;
  std::vector<int64_t> by_label, at_peak;

  void add(int64_t bytes, size_t label) {
    std::lock_guard<std::mutex> guard(mutex);
    if (by_label.size() <= label) by_label.resize(label + 1);
    live += bytes;
    by_label[label] += bytes;
    if (live > peak) {
      peak = live;
      at_peak = by_label;
    }
  }
} ledger;

struct Block {
  DataPtr memory;
  int64_t bytes;
  int label;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  ledger.add(-block->bytes, block->label);
  delete block;
}

std::atomic<uintptr_t> nowhere{uintptr_t(1) << 46};  // addresses of what has no values: never read

// memory: taken over; none: new, or nowhere
DataPtr counted(DataPtr memory, size_t size, bool has_values, Device device) {
  int64_t bytes = (int64_t(size) + 511) / 512 * 512;  // as CUDA's allocator rounds
  void* address = memory.get();
  if (!address && size && has_values) {
    memory = GetCPUAllocator()->allocate(size);
    address = memory.get();
  } else if (!has_values) {
    address = reinterpret_cast<void*>(nowhere.fetch_add(bytes));
  }
  if (bytes && device.index() != current) tell("elsewhere", "memory");  // a process opens a context on both cards
  int label = label_of && bytes ? label_of(bytes) : 0;
  ledger.add(bytes, label);
  return DataPtr(address, new Block{std::move(memory), bytes, label}, free_block, device);
}

struct Resizes final : Allocator {  // a storage that may grow must name one
  DataPtr allocate(size_t n) override { return counted(DataPtr(), n, true, Device(kCUDA, current)); }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} resizes;

bool has_values(ScalarType type) { return values || !isFloatingType(type); }

Storage new_storage(size_t size, bool valued, Device device, DataPtr memory = DataPtr()) {
  auto data = counted(std::move(memory), size, valued, device);
  return Storage(Storage::use_byte_size_t(), size, std::move(data), &resizes, /*resizable=*/true);
}

Tensor make(Storage storage, DispatchKey key, const TensorImpl& like) {
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}

Device or_current(std::optional<Device> device) { return Device(kCUDA, device && device->has_index() ? device->index() : current); }

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  auto type = dtype.value_or(get_default_dtype_as_scalartype());
  size_t bytes = at::detail::computeStorageNbytes(size, stride, elementSize(type));
  auto storage = new_storage(bytes, has_values(type), or_current(device));
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), scalarTypeToTypeMeta(type));
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return out;
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout> layout, std::optional<Device> device,
             std::optional<bool> pin, std::optional<MemoryFormat>) {
  std::vector<int64_t> stride(size.size(), 1);
  for (int64_t i = int64_t(size.size()) - 2; i >= 0; --i) stride[i] = stride[i + 1] * std::max<int64_t>(size[i + 1], 1);
  return empty_strided(size, stride, dtype, layout, device, pin);
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> dense(size.size(), 1);
  for (int64_t i = int64_t(size.size()) - 2; i >= 0; --i) dense[i] = dense[i + 1] * size[i + 1];
  impl->set_sizes_and_strides(size, stride.empty() && !size.empty() ? IntArrayRef(dense) : stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  int64_t length = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {length}, {1});
}

struct Pinned final : Allocator {
  std::mutex mutex;
  std::set<const void*> blocks;
  DataPtr allocate(size_t n) override {
    auto memory = GetCPUAllocator()->allocate(n);
    std::lock_guard<std::mutex> guard(mutex);
    blocks.insert(memory.get());
    auto* address = memory.get();
    return DataPtr(address, new DataPtr(std::move(memory)), &release, kCPU);
  }
  static void release(void* context);
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} pinned;

void Pinned::release(void* context) {
  auto* memory = static_cast<DataPtr*>(context);
  {
    std::lock_guard<std::mutex> guard(pinned.mutex);
    pinned.blocks.erase(memory->get());
  }
  delete memory;
}

// ---- operators

const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::masked_select", "aten::repeat_interleave", "aten::bincount"};

// One call: its tensors on the device, and what stands for them on the CPU or the meta device.
struct Call {
  Device device = Device(kCUDA, current);
  bool meta = false;
  std::vector<std::pair<Storage, Storage>> storages;                  // of the device, of the stand-in
  std::vector<std::pair<Tensor, Tensor>> tensors;                     // likewise

  Tensor there(const Tensor& t) {
    if (!t.defined() || !(t.is_cuda() || (meta && t.is_cpu()))) return t;
    for (auto& [own, other] : tensors)
      if (own.is_same(t)) return other;
    Storage other;
    for (auto& [own, known] : storages)
      if (own.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) other = known;
    if (!other) {
      auto type = meta ? kMeta : kCPU;
      auto* owner = new Storage(t.storage());
      DataPtr data(meta ? nullptr : t.storage().mutable_data(), owner, [](void* o) { delete static_cast<Storage*>(o); }, type);
      other = Storage(Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), GetAllocator(type), true);
      storages.emplace_back(t.storage(), other);
    }
    auto out = make(other, meta ? DispatchKey::Meta : DispatchKey::CPU, *t.unsafeGetTensorImpl());
    tensors.emplace_back(t, out);
    return out;
  }

  Storage adopt(const Storage& other, ScalarType type) {
    for (auto& [own, known] : storages)
      if (known.unsafeGetStorageImpl() == other.unsafeGetStorageImpl()) return own;
    auto memory = meta ? DataPtr() : other.unsafeGetStorageImpl()->set_data_ptr(DataPtr(nullptr, kCPU));
    auto own = new_storage(other.nbytes(), !meta || has_values(type), device, std::move(memory));
    if (meta && has_values(type)) std::memset(own.mutable_data(), type == kBool, other.nbytes());
    storages.emplace_back(own, other);
    return own;
  }

  Tensor back(const Tensor& t) {
    if (!t.defined() || t.is_cuda()) return t;
    for (auto& [own, other] : tensors)
      if (other.is_same(t)) return own;
    return make(adopt(t.storage(), t.scalar_type()), DispatchKey::CUDA, *t.unsafeGetTensorImpl());
  }

  // What was written may have been resized.
  void written() {
    for (auto& [own, other] : storages)
      if (own.nbytes() != other.nbytes()) {
        auto memory = meta ? DataPtr() : other.unsafeGetStorageImpl()->set_data_ptr(DataPtr(nullptr, kCPU));
        auto* impl = own.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(counted(std::move(memory), other.nbytes(), !meta, device));
        impl->set_nbytes(other.nbytes());
      }
    for (auto& [own, other] : tensors)
      if (own.is_cuda() && (own.sizes() != other.sizes() || own.strides() != other.strides()))
        own.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  }
};

template <class Visit>
void for_tensors(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector()) visit(t);
  } else if (value.isOptionalTensorList()) {
    for (const auto& t : value.toOptionalTensorVector())
      if (t) visit(*t);
  } else if (value.isList()) {
    for (const IValue& part : value.toListRef()) for_tensors(part, visit);
  }
}

template <class Change>
IValue with_tensors(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    List<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(change(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    List<std::optional<Tensor>> out;
    for (const auto& t : value.toOptionalTensorVector()) out.push_back(t ? std::optional(change(*t)) : std::nullopt);
    return out;
  }
  if (value.isList()) {
    auto out = value.toList().copy();
    for (size_t i = 0; i < out.size(); ++i) out.set(i, with_tensors(out.get(i), change));
    return out;
  }
  if (value.isTuple()) {
    std::vector<IValue> out;
    for (const auto& part : value.toTupleRef().elements()) out.push_back(with_tensors(part, change));
    return ivalue::Tuple::create(std::move(out));
  }
  return value;
}

// A mask among the indices has as many places as it has ones, which the meta device cannot know.
IValue indices_of(const IValue& indices) {
  List<std::optional<Tensor>> out;
  for (const auto& t : indices.toOptionalTensorVector()) {
    if (!t || t->scalar_type() != kBool) {
      out.push_back(t);
      continue;
    }
    for (const Tensor& places : t->nonzero().unbind(1)) out.push_back(places);
  }
  return out;
}

void run(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& name = op.schema().name();
  const bool puts = name == "aten::_index_put_impl_", indexes = puts || name == "aten::index";
  const size_t count = op.schema().arguments().size(), start = stack->size() - count;
  Call call;
  bool mixed = false, masks = false, on_device = false, floats = false;
  for (size_t i = start; i < stack->size(); ++i)
    for_tensors((*stack)[i], [&](const Tensor& t) {
      if (!t.defined()) return;
      if (t.is_cuda() && !on_device) call.device = t.device();
      on_device |= t.is_cuda();
      mixed |= !t.is_cuda() && t.dim();
      masks |= indexes && t.scalar_type() == kBool && i == start + 1;
      floats |= t.is_cuda() && isFloatingType(t.scalar_type());
    });
  TORCH_CHECK(!mixed || !on_device || indexes, name, ": tensors on cuda and on cpu, expected all on the same device");
  if (on_device && ((masks && puts) || mixed || WAITING.count(name))) tell("waits", name);  // index asks nonzero itself

  call.meta = !values && floats;
  if (call.meta && name == "aten::_local_scalar_dense") {
    stack->pop_back();
    stack->emplace_back(0.0);  // what has no value is 0, and compares as true
    return;
  }
  std::vector<Tensor> results_of_floats;  // integers and truth values that this writes
  for (size_t i = start; call.meta && i < stack->size(); ++i)
    if (auto* alias = op.schema().arguments()[i - start].alias_info(); alias && alias->isWrite())
      for_tensors((*stack)[i], [&](const Tensor& t) {
        if (t.is_cuda() && !isFloatingType(t.scalar_type())) results_of_floats.push_back(t);
      });
  if (call.meta && indexes && masks) (*stack)[start + 1] = indices_of((*stack)[start + 1]);
  for (size_t i = start; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!on_device) call.device = or_current(value.toDevice());
      value = Device(call.meta ? kMeta : kCPU);
    } else {
      value = with_tensors(value, [&](const Tensor& t) { return call.there(t); });
    }
  }
  op.callBoxed(stack);
  call.written();
  for (Tensor& t : results_of_floats) t.fill_(t.scalar_type() == kBool);
  const size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i)
    (*stack)[i] = with_tensors((*stack)[i], [&](const Tensor& t) { return call.back(t); });
}

Tensor& copy(Tensor& self, const Tensor& src, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const bool to = self.is_cuda(), from = src.is_cuda();
  if (to != from && !(to && non_blocking && src.is_pinned())) tell("waits", to ? "copy to the device" : "copy to the host");
  auto known = [](const Tensor& t) { return !t.is_cuda() || has_values(t.scalar_type()); };
  if (!known(self)) return self;
  if (!known(src)) {
    self.zero_();
    return self;
  }
  Call call;
  call.there(self).copy_(call.there(src).expand_as(self));
  return self;
}

// ---- attention: the kernel that CUDA would choose. With values all of them are torch's formula.

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                 bool causal, std::optional<double> scale, bool grouped) {
  const bool half = q.scalar_type() == kHalf || q.scalar_type() == kBFloat16;
  const bool can = q.scalar_type() != kDouble && (q.scalar_type() != kBFloat16 || major_capability >= 8) && q.dim() == 4;
  const bool repeats = grouped && q.size(1) != k.size(1), gradient = GradMode::is_enabled() && (q.requires_grad() || k.requires_grad());
  if (half && can && !mask && major_capability >= 8) {
    tell("attention", "flash");
    if (!values) return std::get<0>(at::_scaled_dot_product_flash_attention(q, k, v, dropout, causal, false, scale));
  } else if (can && !repeats) {
    tell("attention", "memory-efficient");
    if (!values) {
      std::optional<Tensor> bias = mask;
      if (mask && mask->scalar_type() == kBool) bias = at::zeros(mask->sizes(), q.options()).masked_fill_(mask->logical_not(), -INFINITY);
      if (int64_t over = bias ? bias->size(-1) % 8 : 0) bias = at::constant_pad_nd(*bias, {0, 8 - over}).slice(-1, 0, k.size(2));
      if (bias) bias = bias->expand({q.size(0), q.size(1), q.size(2), k.size(2)});
      return std::get<0>(at::_scaled_dot_product_efficient_attention(q, k, v, bias, gradient, dropout, causal, scale));
    }
  } else {
    tell("attention", "math");
  }
  std::optional<Tensor> bias = mask;
  if (mask && mask->scalar_type() == kBool) bias = at::zeros(mask->sizes(), q.options()).masked_fill_(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, bias, dropout, causal, std::nullopt, scale, grouped));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", attention); }

// ---- what torch asks of a device

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    current = d.index();
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const override { return s; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = nullptr; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned.mutex);
    return pinned.blocks.count(data);
  }
};

struct Clock final : c10d::Timer {  // DDP wants one
  explicit Clock(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

struct Nothing final : WarningHandler {
  void process(const Warning&) override {}
};

}  // namespace

namespace at {
static RegistererCUDAHooksRegistry hooks("CUDAHooks", CUDAHooksRegistry(), RegistererCUDAHooksRegistry::DefaultCreator<Hooks>);
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, kCUDA, ::Clock);
}

extern "C" {

void standin_card(int count, int capability, bool with_values) {
  devices = count, major_capability = capability, values = with_values;
}
void standin_listen(void (*on_event)(const char*, const char*), int (*on_allocation)(int64_t)) {
  told = on_event, label_of = on_allocation;
}
int standin_device() { return current; }
void standin_set_device(int index) { current = index; }
int64_t standin_live() { return ledger.live; }
int64_t standin_peak() { return ledger.peak; }
int64_t standin_at_peak(size_t label) { return label < ledger.at_peak.size() ? ledger.at_peak[label] : 0; }
void standin_reset_peak() {
  std::lock_guard<std::mutex> guard(ledger.mutex);
  ledger.peak = ledger.live, ledger.at_peak = ledger.by_label;
}

// Collectives of device tensors go over gloo, whose own kernels of CUDA were not built.
void standin_collectives() {
  static Nothing quiet;
  WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (auto name : {"allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "reduce_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}
}
