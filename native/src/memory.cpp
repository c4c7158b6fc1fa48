#include "common.h"

#include <cerrno>
#include <fcntl.h>
#include <system_error>
#include <utility>

namespace mill {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Memory Memory::shared(size_t bytes) {
    Memory memory;
    if (bytes == 0) return memory;
    memory.descriptor_ = memfd_create("tokenmill-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory.descriptor_ < 0) fail("[memory] the system gives no shared memory");
    memory.bytes_ = bytes;
    if (ftruncate(memory.descriptor_, off_t(memory.mapped()))) fail("[memory] the system gives not so much shared memory");
    memory.map(MAP_SHARED, memory.descriptor_);
    // Sealed once it is mapped: this process goes on writing.
    if (fcntl(memory.descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)) fail("[memory] the system cannot seal shared memory");
    return memory;
}

}  // namespace mill
