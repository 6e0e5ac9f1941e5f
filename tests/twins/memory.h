// Caching allocators: what is freed is handed out again at once, while kernels that nobody has recorded still use it.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

namespace twins {

constexpr size_t kRound = 512;  // bytes, as CUDA's
constexpr int kPoison = 0xff;   // NaN in every floating-point dtype
constexpr auto kFreed = "memory is handed out again";

struct Block {
  char* data;
  size_t bytes;
  Queue* owner;            // on which it was allocated; none for pinned memory of the host
  std::set<Queue*> users;  // other streams that use it
};

class Pool {
 public:
  Block* take(size_t bytes, Queue* owner) {
    bytes = std::max((bytes + kRound - 1) / kRound, size_t(1)) * kRound;
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    auto& free = free_[{owner, bytes}];
    if (!free.empty()) {
      auto* block = free.back();
      free.pop_back();
      return block;
    }
    auto* block = new Block{static_cast<char*>(std::aligned_alloc(64, bytes)), bytes, owner, {}};
    std::memset(block->data, kPoison, bytes);
    if (owner == nullptr) pinned_[block->data] = block;
    return block;
  }
  void free(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<PointPtr> ends;
    for (auto* user : block->users) ends.push_back(user->mark());
    block->users.clear();
    waiting_.push_back({block, std::move(ends)});
    reclaim();
  }
  void record(Block* block, Queue& user) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (block->owner != &user) block->users.insert(&user);
  }
  // The pinned block that `data` lies in, if any.
  Block* pinned(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = pinned_.upper_bound(static_cast<const char*>(data));
    if (after == pinned_.begin()) return nullptr;
    auto* block = std::prev(after)->second;
    return static_cast<const char*>(data) < block->data + block->bytes ? block : nullptr;
  }

 private:
  struct Waiting {
    Block* block;
    std::vector<PointPtr> ends;
  };
  // From here on a block is its owner's, or the host's: what reads it unrecorded reads NaN.
  void hand_back(Block& block, const std::vector<PointPtr>& ends) {
    auto* owner = block.owner;
    auto device = owner == nullptr ? kHost : owner->device, stream = owner == nullptr ? kHost : owner->id;
    Ranges whole{{reinterpret_cast<uintptr_t>(block.data), 0, static_cast<int64_t>(block.bytes)}};
    for (const auto& end : ends) order().note({"recorded", device, stream, end->number, kFreed, {}, whole});
    auto poison = [&block] { std::memset(block.data, kPoison, block.bytes); };
    if (owner != nullptr) return owner->put(kFreed, {}, whole, poison, false);
    order().note({"use", device, stream, 0, kFreed, {}, whole});
    poison();
  }
  void reclaim() {
    std::vector<Waiting> still;
    for (auto& one : waiting_) {
      auto* block = one.block;
      if (!std::all_of(one.ends.begin(), one.ends.end(), [](auto& end) { return end->is_reached(); })) {
        still.push_back(std::move(one));
        continue;
      }
      hand_back(*block, one.ends);
      free_[{block->owner, block->bytes}].push_back(block);
    }
    waiting_ = std::move(still);
  }

  std::mutex mutex_;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free_;
  std::map<const char*, Block*> pinned_;
  std::vector<Waiting> waiting_;
};
inline Pool& pool() {
  static auto* one = new Pool();
  return *one;
}

inline void free_block(void* block) { pool().free(static_cast<Block*>(block)); }

inline Block* block_of(const c10::DataPtr& memory) {
  return memory.get_deleter() == &free_block ? static_cast<Block*>(memory.get_context()) : nullptr;
}

struct Allocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = pool().take(bytes, owner());
    return {block->data, block, &free_block, device()};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "memory of a device is copied by its kernels");
  }
  virtual Queue* owner() const { return &current_queue(current_device); }
  virtual c10::Device device() const { return {kTwin, current_device}; }
};
struct PinnedAllocator final : Allocator {
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  Queue* owner() const override { return nullptr; }
  c10::Device device() const override { return c10::DeviceType::CPU; }
};
// What `tensor` covers of its block; nothing where that is no block of these.
inline Ranges ranges_of(const at::Tensor& tensor) {
  auto* block = order().is_on() ? block_of(tensor.storage().data_ptr()) : nullptr;
  if (block == nullptr || tensor.numel() == 0) return {};
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) elements += (tensor.size(i) - 1) * tensor.stride(i);
  auto begin = static_cast<int64_t>(tensor.storage_offset() * tensor.itemsize());
  auto end = begin + static_cast<int64_t>(elements * tensor.itemsize());
  return {{reinterpret_cast<uintptr_t>(block->data), begin, end}};
}
inline void extend(Ranges& ranges, const Ranges& by) { ranges.insert(ranges.end(), by.begin(), by.end()); }

inline Allocator allocator;
inline PinnedAllocator pinned_allocator;

}  // namespace twins
