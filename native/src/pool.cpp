#include "pool.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <sched.h>
#include <stdexcept>
#include <string>

namespace mill {
namespace {

// The others are normally microseconds away; when they are not, the machine is oversubscribed and the core is better given up.
constexpr int kSpins = 2000;
// Between steps the next job is normally a fraction of a millisecond away.
constexpr int kIdleSpins = 20000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void Barrier::wait() {
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.store(generation + 1, std::memory_order_release);
        return;
    }
    for (int i = 0; generation_.load(std::memory_order_acquire) == generation; ++i) {
        if (i < kSpins) relax();
        else sched_yield();
    }
}

void Claims::reset(int n, int threads) {
    n_ = n;
    threads_ = threads;
    at_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
}

void Claims::wait() const {
    for (int i = 0; done_.load(std::memory_order_acquire) < n_; ++i) {
        if (i < kSpins) relax();
        else sched_yield();
    }
}

bool Claims::next(int& begin, int& end) {
    // Half a fair share of what is left: long runs first, which keep memory streams long, and short ones at the end, so that threads arrive together.
    begin = at_.load(std::memory_order_relaxed);
    do {
        if (begin >= n_) return false;
        end = begin + (threads_ == 1 ? n_ - begin : std::max(1, (n_ - begin) / (2 * threads_)));
    } while (!at_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
}

Pool::Pool(int threads) : barrier_(threads) {
    if (threads < 1) throw std::invalid_argument("[pool] needs at least one thread, not " + std::to_string(threads));
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { serve(t); });
}

Pool::~Pool() {
    stop_.store(true);
    job_.fetch_add(1);
    job_.notify_all();
    for (auto& w : workers_) w.join();
}

void Pool::serve(int thread) {
    uint32_t seen = 0;
    while (true) {
        for (int i = 0; job_.load(std::memory_order_acquire) == seen; ++i) {
            if (i < kIdleSpins) relax();
            else job_.wait(seen);
        }
        seen = job_.load(std::memory_order_acquire);
        if (stop_.load()) return;
        (*body_)(thread);
        barrier_.wait();
    }
}

void Pool::run(const std::function<void(int)>& body) {
    body_ = &body;
    job_.fetch_add(1, std::memory_order_release);
    if (!workers_.empty()) job_.notify_all();
    body(0);
    barrier_.wait();
}

void Pool::parallel(int n, const std::function<void(int, int)>& body) {
    Claims claims;
    claims.reset(n, threads());
    std::exception_ptr error;
    std::mutex lock;
    run([&](int) {
        try {
            int begin, end;
            while (claims.next(begin, end)) body(begin, end);
        } catch (...) {
            std::lock_guard hold(lock);
            error = std::current_exception();
        }
    });
    if (error) std::rethrow_exception(error);
}

}  // namespace mill
