#include "pool.h"

#include <algorithm>
#include <sched.h>
#include <stdexcept>
#include <string>
#include <utility>

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

// Waits for threads that are expected within microseconds.
template <class Done> void await(Done done) {
    for (int i = 0; !done(); ++i) {
        if (i < kSpins) relax();
        else sched_yield();
    }
}

}  // namespace

void Claims::reset(int n, int threads) {
    n_ = n;
    threads_ = threads;
    at_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
}

void Claims::wait() const {
    await([&] { return done_.load(std::memory_order_acquire) >= n_; });
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

Pool::Pool(int threads) {
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
        work(thread);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::work(int thread) noexcept {
    try {
        (*body_)(thread);
    } catch (...) {
        std::lock_guard hold(lock_);
        if (!error_) error_ = std::current_exception();
    }
}

void Pool::require_idle() const {
    if (state_.load() != State::Idle) throw std::logic_error("[pool] a job is under way: finish it before the next");
}

void Pool::start(const std::function<void(int)>& body) {
    State idle = State::Idle;
    if (!state_.compare_exchange_strong(idle, State::Started)) require_idle();
    body_ = &body;
    busy_.store(int(workers_.size()), std::memory_order_relaxed);
    job_.fetch_add(1, std::memory_order_release);
    if (!workers_.empty()) job_.notify_all();
}

void Pool::finish() {
    State started = State::Started;
    if (!state_.compare_exchange_strong(started, State::Finishing)) throw std::logic_error("[pool] no job was started");
    work(0);
    await([&] { return busy_.load(std::memory_order_acquire) == 0; });
    const std::exception_ptr error = std::exchange(error_, nullptr);
    state_.store(State::Idle);
    if (error) std::rethrow_exception(error);
}

void Pool::run(const std::function<void(int)>& body) {
    start(body);
    finish();
}

void Pool::parallel(int n, const std::function<void(int, int)>& body) {
    if (n == 1) {   // nothing to divide, so that nobody need be woken
        require_idle();
        return body(0, 1);
    }
    Claims claims;
    claims.reset(n, threads());
    run([&](int) {
        int begin, end;
        while (claims.next(begin, end)) body(begin, end);
    });
}

}  // namespace mill
