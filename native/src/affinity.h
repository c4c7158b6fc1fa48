// Keeping threads on CPUs, where the system can.
#pragma once

#include <pthread.h>
#include <sched.h>

namespace mill {

#if defined(__linux__)

inline bool keep_on(pthread_t thread, int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return pthread_setaffinity_np(thread, sizeof one, &one) == 0;
}

// While it lives, the calling thread is kept on a CPU; afterwards it may go where it could before.
class OnCpu {
public:
    static constexpr int kAny = -1;

    explicit OnCpu(int cpu)
        : kept_(cpu != kAny && pthread_getaffinity_np(pthread_self(), sizeof before_, &before_) == 0 && keep_on(pthread_self(), cpu)) {}
    ~OnCpu() {
        if (kept_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
    }
    OnCpu(const OnCpu&) = delete;

    bool kept() const { return kept_; }

private:
    cpu_set_t before_;
    const bool kept_;
};

#else

inline bool keep_on(pthread_t, int) { return false; }

class OnCpu {
public:
    static constexpr int kAny = -1;
    explicit OnCpu(int) {}
    ~OnCpu() {}
    bool kept() const { return false; }
};

#endif

}  // namespace mill
