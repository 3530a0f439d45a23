// A device `cuda:N` for builds of PyTorch without CUDA. Its tensors have memory of their own, which no CPU operator
// takes; the CPU's kernels compute on it. It raises where CUDA would: for operands on two devices, for a generator of
// the host, beyond its memory. Fresh and freed memory is poisoned. Operators, copies and waits of the host are counted.
//
// Loaded by fake_gpu/cuda.py with ctypes: nothing here needs Python's headers.
//
//     tensor on cuda:1 ──operator──> fallback: same memory seen as a CPU tensor ──CPU kernel──> results in memory of cuda:1
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/cat.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
using c10::StreamId;
using Clock = std::chrono::steady_clock;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr auto HOST = c10::DeviceType::CPU;
constexpr int MOST = 8; // devices

int devices = 1;
size_t capacity = size_t(80) << 30;
thread_local DeviceIndex current = 0;
thread_local std::array<StreamId, MOST> streams{};
std::mutex lock;

DeviceIndex index_of(Device d) { return d.index() < 0 ? current : d.index(); }
void select(DeviceIndex i) {
  TORCH_CHECK(i >= 0 && i < devices, "CUDA error: invalid device ordinal (fake device ", int(i), " of ", devices, ")");
  current = i;
}

// ------------------------------------------------------------------------------------------------ what is counted
// "launch:add.Tensor" -> times; waits of the host are "wait:KIND:OPERATOR".
std::map<std::string, int64_t> counted;
using Watch = void (*)(const char* kind, const char* name);
std::atomic<Watch> watch{nullptr};

void count(const std::string& what) {
  std::lock_guard<std::mutex> hold(lock);
  ++counted[what];
}
void waits(const char* kind, const std::string& name) {
  count("wait:" + std::string(kind) + ":" + name);
  if (auto tell = watch.load()) tell(kind, name.c_str());
}

// ------------------------------------------------------------------------------------------------ memory
std::array<c10::CachingDeviceAllocator::DeviceStats, MOST> stats;
struct Block {
  size_t size;
  DeviceIndex device;
};
std::unordered_map<void*, Block> blocks;
std::unordered_set<const void*> pinned;
constexpr int POISON = 0xFF; // as floats: not a number; as integers: -1

void release(void* at_) {
  if (at_ == nullptr) return;
  std::lock_guard<std::mutex> hold(lock);
  auto found = blocks.find(at_);
  TORCH_INTERNAL_ASSERT(found != blocks.end());
  auto& s = stats[found->second.device];
  s.allocated_bytes[0].decrease(found->second.size);
  s.reserved_bytes[0].decrease(found->second.size);
  s.allocation[0].decrease(1);
  std::memset(at_, POISON, found->second.size);
  blocks.erase(found);
  std::free(at_);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const Device device(CUDA, current);
    if (n == 0) return {nullptr, nullptr, &release, device};
    const size_t size = (n + 511) / 512 * 512;
    std::lock_guard<std::mutex> hold(lock);
    auto& s = stats[current];
    const size_t used = s.allocated_bytes[0].current;
    TORCH_CHECK_WITH(
        OutOfMemoryError, used + size <= capacity, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ",
        int(current), " (fake) has a total capacity of ", capacity, " bytes of which ", capacity - used, " bytes are free.");
    void* at_ = nullptr;
    TORCH_CHECK(posix_memalign(&at_, 512, size) == 0, "the host has no memory left for the fake device");
    std::memset(at_, POISON, size);
    s.allocated_bytes[0].increase(size);
    s.reserved_bytes[0].increase(size);
    s.allocation[0].increase(1);
    blocks[at_] = {size, current};
    return {at_, at_, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override { return stats.at(i); }
  void resetAccumulatedStats(DeviceIndex i) override { stats.at(i).allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(DeviceIndex i) override {
    stats.at(i).allocated_bytes[0].reset_peak();
    stats.at(i).reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override {
    return {capacity - stats.at(i).allocated_bytes[0].current, capacity};
  }
};
DeviceMemory device_memory;

void unpin(void* at_) {
  std::lock_guard<std::mutex> hold(lock);
  pinned.erase(at_);
  std::free(at_);
}
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &unpin, Device(HOST)};
    void* at_ = std::malloc(n);
    std::lock_guard<std::mutex> hold(lock);
    pinned.insert(at_);
    return {at_, at_, &unpin, Device(HOST)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
PinnedMemory pinned_memory;
bool lies_pinned(const void* at_) {
  std::lock_guard<std::mutex> hold(lock);
  return pinned.count(at_) > 0;
}

// ------------------------------------------------------------------------------------------------ streams, events
// Operators have ended when they return, so a stream is only a number and an event only a time. The streams can be
// stuck, behind a message that never comes: events that were recorded since then do not occur.
std::atomic<Clock::rep> stuck_since{std::numeric_limits<Clock::rep>::max()};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device d) const override {
    const Device before(CUDA, current);
    select(d.index());
    return before;
  }
  Device getDevice() const override { return Device(CUDA, current); }
  void setDevice(Device d) const override { select(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  static Stream stream(DeviceIndex i, StreamId id) { return Stream(Stream::UNSAFE, Device(CUDA, i), id); }
  Stream getStream(Device d) const override { return stream(index_of(d), streams[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(index_of(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    static std::atomic<StreamId> next{1};
    return stream(index_of(d), next++);
  }
  Stream exchangeStream(Stream s) const override {
    const Stream before = getStream(s.device());
    streams[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(devices); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point();
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Clock::time_point*>(event)->time_since_epoch().count() <= stuck_since.load();
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { waits("synchronize", "stream"); }
  void synchronizeEvent(void*) const override { waits("synchronize", "event"); }
  void synchronizeDevice(const DeviceIndex) const override { waits("synchronize", "device"); }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(*static_cast<Clock::time_point*>(b) - *static_cast<Clock::time_point*>(a)).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ------------------------------------------------------------------------------------------------ generator
// Another sequence than the CPU's for the same seed: what draws on the device where it should draw on the host differs.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  uint64_t seed_ = c10::default_rng_seed_val;
  explicit DeviceGenerator(DeviceIndex i)
      : c10::GeneratorImpl(Device(CUDA, i), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator(other(c10::default_rng_seed_val))) {}
  static uint64_t other(uint64_t seed) { return (seed ^ 0x5DEECE66DULL) & 0xFFFFFFFFULL; }
  static c10::DeviceType device_type() { return CUDA; }
  static at::Generator of(const at::Generator& g) {
    return static_cast<const DeviceGenerator*>(g.unsafeGetGeneratorImpl())->inner;
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    inner.set_current_seed(other(seed));
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(device().index());
    made->inner = inner.clone();
    made->seed_ = seed_;
    return made;
  }
};
const at::Generator& default_generator(DeviceIndex i) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int d = 0; d < MOST; ++d) made.push_back(at::make_generator<DeviceGenerator>(DeviceIndex(d)));
    return made;
  }();
  return all.at(i < 0 ? current : i);
}

// ------------------------------------------------------------------------------------------------ what torch asks
// No data members: see `fake_gpu_start`.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  long versionCUDART() const override { return 13000; }
  std::string showConfig() const override { return "  - fake device\n"; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<DeviceGenerator>(i < 0 ? current : i);
  }
  DeviceIndex deviceCount() const override { return DeviceIndex(devices); }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex i) const override { select(i); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    const auto before = current;
    if (i >= 0) select(i);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  bool isPinnedPtr(const void* at_) const override { return lies_pinned(at_); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Device getDeviceFromPtr(void* at_) const override {
    std::lock_guard<std::mutex> hold(lock);
    return Device(CUDA, blocks.at(at_).device);
  }
  void deviceSynchronize(DeviceIndex) const override { waits("synchronize", "device"); }
};

// ------------------------------------------------------------------------------------------------ from one to the other
// The same memory, as a tensor that the CPU's kernels take.
Tensor on_cpu(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  TORCH_CHECK(t.layout() == c10::kStrided, "the fake device has strided tensors only, not ", t.layout());
  auto* keep = new c10::Storage(t.storage());
  c10::DataPtr memory(
      const_cast<void*>(t.storage().data()), keep, [](void* k) { delete static_cast<c10::Storage*>(k); }, Device(HOST));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(memory), c10::GetAllocator(HOST), true);
  auto seen = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  seen->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) seen->_set_conj(true);
  if (t.is_neg()) seen->_set_neg(true);
  return Tensor(std::move(seen));
}
Tensor fresh(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType type, DeviceIndex i) {
  c10::OptionalDeviceGuard g(Device(CUDA, i < 0 ? current : i));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}
Tensor on_device(const Tensor& t, DeviceIndex i) {
  if (!t.defined() || t.is_cuda()) return t;
  Tensor made = fresh(t.sizes(), t.strides(), t.scalar_type(), i);
  on_cpu(made).copy_(t);
  return made;
}
Tensor view_of(const Tensor& base, const Tensor& seen) {
  auto made = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), seen.dtype());
  made->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
  if (seen.is_conj()) made->_set_conj(true);
  if (seen.is_neg()) made->_set_neg(true);
  return Tensor(std::move(made));
}
// Storage that holds so many bytes, with what was in it.
void grow(const Tensor& t, int64_t needed) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (needed <= int64_t(storage->nbytes())) return;
  c10::OptionalDeviceGuard g(t.device());
  c10::DataPtr made = device_memory.allocate(needed);
  if (storage->nbytes()) std::memcpy(made.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(needed);
}

// ------------------------------------------------------------------------------------------------ operators by hand
Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard g(device);
  const auto dtype = c10::dtype_or_default(type);
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype, format);
}
Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  return fresh(size, stride, c10::dtype_or_default(type), device ? index_of(*device) : current);
}
Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (self.is_cuda() && src.is_cuda()) {
    count(self.get_device() == src.get_device() ? "launch:copy_" : "launch:copy_ between devices");
  } else {
    const bool out = src.is_cuda();
    const bool asynchronous = non_blocking && lies_pinned((out ? self : src).storage().data());
    count(out ? "copy:to host" : "copy:to device");
    if (!asynchronous) waits(out ? "to host" : "to device", "copy_");
  }
  on_cpu(self).copy_(on_cpu(src));
  return self;
}
at::Scalar local_scalar(const Tensor& self) {
  waits("item", "_local_scalar_dense");
  return at::_local_scalar_dense(on_cpu(self));
}
const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (self.numel()) grow(self, (self.storage_offset() + self.numel()) * int64_t(self.itemsize()));
  return self;
}
Tensor& set_storage_offset(
    Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage source) {
  const int64_t n = int64_t(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {n}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_empty(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, true);
  return set_storage_offset(self, std::move(none), 0, {0}, {});
}
void record_stream(Tensor&, Stream) {}

// The cells that PyTorch fuses on a GPU have no kernel for the CPU.
using Maybe = std::optional<Tensor>;
Tensor joined(const std::vector<Tensor>& columns) { return at::cat(columns, 1); }
Tensor gates_of(const Tensor& gates, const Maybe& bias) {
  return bias && bias->defined() ? on_cpu(gates) + on_cpu(*bias) : on_cpu(gates);
}
std::tuple<Tensor, Tensor, Tensor> lstm(
    const Tensor& in, const Tensor& hidden, const Tensor& cx, const Maybe& in_bias, const Maybe& hidden_bias) {
  const auto parts = (gates_of(in, in_bias) + gates_of(hidden, hidden_bias)).chunk(4, 1);
  const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const Tensor cy = f * on_cpu(cx) + i * g;
  const auto d = in.device().index();
  return {on_device(o * cy.tanh(), d), on_device(cy, d), on_device(joined({i, f, g, o}), d)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_backward(
    const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool bias) {
  const auto parts = on_cpu(workspace).chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3], c = on_cpu(cy).tanh();
  Tensor grad_c = grad_cy && grad_cy->defined() ? on_cpu(*grad_cy).clone() : c.new_zeros(c.sizes());
  Tensor grad_o = c.new_zeros(c.sizes());
  if (grad_hy && grad_hy->defined()) {
    const Tensor h = on_cpu(*grad_hy);
    grad_o = h * c * o * (1 - o);
    grad_c = grad_c + h * o * (1 - c * c);
  }
  const Tensor gates = joined({grad_c * g * i * (1 - i), grad_c * on_cpu(cx) * f * (1 - f), grad_c * i * (1 - g * g), grad_o});
  const auto d = workspace.device().index();
  return {on_device(gates, d), on_device(grad_c * f, d), bias ? on_device(gates.sum(0), d) : Tensor()};
}
std::tuple<Tensor, Tensor> gru(
    const Tensor& in, const Tensor& hidden, const Tensor& hx, const Maybe& in_bias, const Maybe& hidden_bias) {
  const auto a = gates_of(in, in_bias).chunk(3, 1), b = gates_of(hidden, hidden_bias).chunk(3, 1);
  const Tensor r = (a[0] + b[0]).sigmoid(), z = (a[1] + b[1]).sigmoid(), n = (a[2] + r * b[2]).tanh();
  const Tensor h = on_cpu(hx);
  const auto d = in.device().index();
  return {on_device(n + z * (h - n), d), on_device(joined({r, z, n, h, b[2]}), d)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad, const Tensor& workspace, bool bias) {
  const auto parts = on_cpu(workspace).chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &h = parts[3], &b = parts[4], g = on_cpu(grad);
  const Tensor grad_n = g * (1 - z) * (1 - n * n), grad_r = grad_n * b * r * (1 - r), grad_z = g * (h - n) * z * (1 - z);
  const Tensor in = joined({grad_r, grad_z, grad_n}), hidden = joined({grad_r, grad_z, grad_n * r});
  const auto d = workspace.device().index();
  auto summed = [&](const Tensor& t) { return bias ? on_device(t.sum(0), d) : Tensor(); };
  return {on_device(in, d), on_device(hidden, d), on_device(g * z, d), summed(in), summed(hidden)};
}

// ------------------------------------------------------------------------------------------------ all other operators
// The size of their result depends on values, or the result is a value of the host.
const std::set<std::string> SIZED_BY_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::equal", "aten::histc"};
const std::set<std::string> INDEXING = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put"};
// Operands that CUDA takes from the host, too: lengths of sequences.
const std::set<std::string> FROM_HOST = {"aten::_pack_padded_sequence"};

std::string short_name(const std::string& name) { return name.substr(name.find(':') + 2); }

struct Operands {
  const std::string& name;
  std::optional<Device> device;
  bool masked = false; // indexed by a mask

  void see(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return;
    if (!device) device = t.device();
    TORCH_CHECK(
        *device == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device,
        " and ", t.device(), "! (", name, ")");
  }
  void see(const IValue& v) {
    if (v.isTensor()) see(v.toTensor());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) see(t);
    else if (v.isOptionalTensorList()) { for (const auto& t : v.toOptionalTensorVector()) if (t) see(*t); }
    else if (v.isDevice() && v.toDevice().is_cuda() && !device) device = Device(CUDA, index_of(v.toDevice()));
  }
  Tensor taken(const Tensor& t, bool may_lie_on_host) const {
    TORCH_CHECK(
        !t.defined() || t.is_cuda() || t.dim() == 0 || may_lie_on_host,
        "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (", name,
        ")");
    return on_cpu(t);
  }
  // The argument as the CPU's kernel gets it.
  IValue taken(const IValue& v, const c10::Argument& parameter) {
    const bool from_host = FROM_HOST.count(name) > 0;
    if (v.isTensor()) {
      // A value of one number may be the host's where it is put at an index.
      return taken(v.toTensor(), from_host || (INDEXING.count(name) && v.toTensor().defined() && v.toTensor().numel() == 1));
    }
    if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(taken(t, from_host));
      return c10::List<Tensor>(list);
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : v.toOptionalTensorVector()) {
        if (t && t->defined()) {
          masked = masked || t->scalar_type() == at::kBool || t->scalar_type() == at::kByte;
          if (!t->is_cuda() && t->dim() > 0) waits("to device", short_name(name) + " by an index of the host");
        }
        list.push_back(t ? std::optional<Tensor>(on_cpu(*t)) : std::nullopt);
      }
      return list;
    }
    if (v.isDevice() && v.toDevice().is_cuda()) return Device(HOST);
    if (v.isGenerator() || (v.isNone() && parameter.type()->str().rfind("Generator", 0) == 0)) {
      if (v.isNone()) return DeviceGenerator::of(default_generator(device->index()));
      TORCH_CHECK(
          v.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
      return DeviceGenerator::of(v.toGenerator());
    }
    return v;
  }
};

// The argument that a result is, or is a view of.
const IValue* source_of(const c10::Argument& result, const std::vector<c10::Argument>& parameters, const std::vector<IValue>& given) {
  const auto* alias = result.alias_info();
  if (alias == nullptr) return nullptr;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto* other = parameters[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return &given[i];
  }
  return nullptr;
}
// What the CPU's kernel made of an argument that it wrote to: another shape, other memory.
void take_shape(const Tensor& t, const Tensor& seen) {
  auto* impl = t.unsafeGetTensorImpl();
  if (seen.storage().data() == t.storage().data()) {
    if (t.sizes() != seen.sizes() || t.strides() != seen.strides())
      impl->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
    return;
  }
  impl->set_sizes_and_strides(seen.sizes(), seen.strides(), 0);
  grow(t, int64_t(seen.storage().nbytes()));
  on_cpu(t).copy_(seen);
}
// Whether an operator that got a mask waits for the number of its rows. `index` calls `nonzero`, which counts.
bool waits_for_mask(const std::string& name, const std::vector<IValue>& given) {
  if (name.rfind("aten::index_put", 0) != 0 && name != "aten::_index_put_impl_") return false;
  const Tensor value = given[2].toTensor();
  return value.numel() != 1 || value.is_cuda(); // one number of the host is filled in
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  const size_t n = parameters.size(), first = stack->size() - n;
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  Operands operands{schema.name(), {}};
  for (const auto& v : given) operands.see(v);
  if (!operands.device) operands.device = Device(CUDA, current);
  const auto index = operands.device->index();
  c10::OptionalDeviceGuard g(*operands.device);
  for (size_t i = 0; i < n; ++i) (*stack)[first + i] = operands.taken(given[i], parameters[i]);
  const std::vector<IValue> used(stack->begin() + first, stack->end());

  const auto& results = schema.returns();
  const bool views = std::all_of(results.begin(), results.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
  if (!views) count("launch:" + short_name(operands.name));
  const bool repeats = operands.name == "aten::repeat_interleave" && given.back().isNone();
  if (SIZED_BY_VALUES.count(operands.name) || repeats || (operands.masked && waits_for_mask(operands.name, given)))
    waits("size", short_name(operands.name));
  op.callBoxed(stack);

  for (size_t i = 0; i < n; ++i) {
    const auto* alias = parameters[i].alias_info();
    if (alias != nullptr && alias->isWrite() && given[i].isTensor() && given[i].toTensor().defined() &&
        given[i].toTensor().is_cuda())
      take_shape(given[i].toTensor(), used[i].toTensor());
  }
  const size_t out = stack->size() - results.size();
  for (size_t i = 0; i < results.size(); ++i) {
    IValue& v = (*stack)[out + i];
    const IValue* from = source_of(results[i], parameters, given);
    const bool written = results[i].alias_info() != nullptr && results[i].alias_info()->isWrite();
    if (v.isTensor() && v.toTensor().defined()) {
      const Tensor t = v.toTensor();
      if (from == nullptr || !from->isTensor() || !from->toTensor().is_cuda()) v = on_device(t, index);
      else v = written ? from->toTensor() : view_of(from->toTensor(), t);
    } else if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) {
        if (from != nullptr && from->isTensor()) list.push_back(view_of(from->toTensor(), t));
        else if (from != nullptr && from->isTensorList()) list.push_back(from->toTensorVector()[list.size()]);
        else list.push_back(on_device(t, index));
      }
      v = c10::List<Tensor>(list);
    }
  }
}
std::optional<at::Generator> generator(int64_t i) { return default_generator(DeviceIndex(i)); }
} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_backward));
}
TORCH_LIBRARY(fake_gpu, m) { m.def("generator(int index) -> Generator?", TORCH_FN(generator)); }

// ------------------------------------------------------------------------------------------------ for fake_gpu/cuda.py
extern "C" {
void fake_gpu_start(int number, uint64_t bytes) {
  devices = std::min(number, MOST);
  capacity = bytes;
  c10::SetAllocator(CUDA, &device_memory, 255);
  // torch has made its own hooks by now and has no way to replace them. Neither class has data members, so the table of
  // virtual functions is all that distinguishes the two objects.
  static Hooks ours;
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(theirs) = *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&ours));
}
int fake_gpu_device() { return current; }
int fake_gpu_select(int i) {
  if (i < 0 || i >= devices) return -1;
  current = DeviceIndex(i);
  return i;
}
void fake_gpu_wait(const char* kind, const char* name) { waits(kind, name); }
void fake_gpu_watch(Watch told) { watch = told; }
void fake_gpu_stick() { stuck_since = Clock::now().time_since_epoch().count(); }
// What was counted since the last call, as lines of "times<tab>what", up to `room` bytes; returns the bytes it takes.
size_t fake_gpu_take(char* text, size_t room) {
  std::lock_guard<std::mutex> hold(lock);
  std::ostringstream lines;
  for (const auto& [what, times] : counted) lines << times << '\t' << what << '\n';
  const std::string all = lines.str();
  if (all.size() <= room) {
    std::memcpy(text, all.data(), all.size());
    counted.clear();
  }
  return all.size();
}
}
