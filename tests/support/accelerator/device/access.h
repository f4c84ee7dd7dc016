// Which bytes of a block of memory jobs read and write, and whether two of them are unordered.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"

namespace torch {
struct CapturedTraceback;
}

namespace sim {

// Where a job was issued: the operator, its node of the backward pass, and the stack of Python.
struct Place {
  std::string name;
  std::shared_ptr<torch::CapturedTraceback> stack;
};
std::shared_ptr<const Place> here(const std::string& name);
std::string to_string(const Place& place);

using Bytes = std::vector<std::pair<size_t, size_t>>;  // begins and ends, rising

struct Access {
  Bytes bytes;
  bool is_write;
  const Queue* queue = nullptr;
  uint64_t tick = 0;
  std::shared_ptr<const Place> place;
};

// The bytes of a tensor in its storage. Of views of more than `most` pieces, the first ones.
Bytes bytes_of(const at::Tensor& tensor, size_t most = 4096);

// What jobs did with one block. Call with `clocks` held.
class History {
 public:
  // Return the access that a new one conflicts with: it is unordered, and one of them writes.
  const Access* conflict(const Access& access, const Clock& seen) const;
  void add(Access access);
  // Return an access, of another stream than `own`, that `seen` does not come after.
  const Access* unseen(const Queue* own, const Clock& seen) const;
  template <class F>
  void forget(F is_over) {
    std::erase_if(accesses_, is_over);
  }

 private:
  std::vector<Access> accesses_;
};

// Faults that no call could raise, as in a destructor: the next operator raises them.
void report(std::string fault);
void raise_reported();
bool has_reports();
uint64_t faults();  // that were found

}  // namespace sim
