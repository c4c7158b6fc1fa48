#include "pool.h"

#include "affinity.h"
#include "turn.h"

#include <algorithm>
#include <climits>
#include <sched.h>
#include <stdexcept>
#include <string>
#include <system_error>
#include <time.h>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

Turn::Time clock_time(clockid_t clock) {
    timespec t{};
    clock_gettime(clock, &t);
    return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
}
Turn::Time now() { return clock_time(CLOCK_MONOTONIC); }
Turn::Time used() { return clock_time(CLOCK_THREAD_CPUTIME_ID); }

thread_local Turn turn;

void between_runs() {
    const Turn::Time at = now();
    if (!turn.due(at) || !turn.over(at, used())) return;
    sched_yield();
    turn.gave_way(now(), used());
}

// std::atomic's own wait yields before it sleeps.
#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) { syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) { word.wait(value); }
void wake_all(std::atomic<uint32_t>& word) { word.notify_all(); }
#endif

}  // namespace

template <class Done> void Awaited::wait(int spins, Done done) {
    for (int i = 0; i < spins; ++i) {
        if (done(value.load(std::memory_order_acquire))) return;
        relax();
    }
    // Counted before the last look, so that whoever changes the value later sees a sleeper.
    sleepers_.fetch_add(1);
    for (uint32_t seen; !done(seen = value.load());) sleep_while(value, seen);
    sleepers_.fetch_sub(1);
    turn.begin(now(), used());
}

void Awaited::wake() {
    if (sleepers_.load()) wake_all(value);
}

void Claims::reset(int n, int threads) {
    n_ = uint32_t(n);
    threads_ = uint32_t(threads);
    at_.store(0, std::memory_order_relaxed);
    done_.value.store(0, std::memory_order_relaxed);
}

bool Claims::next(int& begin, int& end) {
    uint32_t at = at_.load(std::memory_order_relaxed), run;
    // Only where others can go on meanwhile, and not at a phase's end, where runs are too short for the clock.
    if (threads_ > 1 && at + 4 * threads_ <= n_) between_runs();
    // Half a fair share of what is left: long runs first, which keep memory streams long, and short ones at the end, so that threads arrive together.
    do {
        if (at >= n_) return false;
        run = threads_ == 1 ? n_ - at : std::max(1u, (n_ - at) / (2 * threads_));
    } while (!at_.compare_exchange_weak(at, at + run, std::memory_order_relaxed));
    begin = int(at);
    end = int(at + run);
    return true;
}

void Claims::done(int items) {
    if (done_.value.fetch_add(uint32_t(items)) + uint32_t(items) == n_) done_.wake();
}

void Claims::wait() {
    done_.wait(kSpins, [&](uint32_t done) { return done == n_; });
}

Pool::Pool(int threads, std::vector<int> cpus) : cpus_(std::move(cpus)) {
    if (threads < 1) throw std::invalid_argument("[pool] needs at least one thread, not " + std::to_string(threads));
    let_pass_.resize(threads);
    if (!cpus_.empty() && int(cpus_.size()) != threads) throw std::invalid_argument("[pool] needs a CPU for each of its threads, or none");
    for (int cpu : cpus_)
        if (!OnCpu(cpu).kept()) throw std::invalid_argument("[pool] the system keeps no thread on CPU " + std::to_string(cpu));
    try {
        for (int t = 1; t < threads; ++t) {
            workers_.emplace_back([this, t] { serve(t); });
            if (!cpus_.empty()) keep_on(workers_.back().native_handle(), cpus_[t]);
        }
    } catch (const std::system_error& error) {
        const size_t had = workers_.size() + 1;
        end_workers();
        throw std::runtime_error("[pool] the system gives only " + std::to_string(had) + " of " + std::to_string(threads) + " threads: " + error.what());
    }
}

Pool::~Pool() { end_workers(); }

void Pool::end_workers() {
    stop_.store(true);
    job_.value.fetch_add(1);
    job_.wake();
    for (auto& w : workers_) w.join();
}

void Pool::serve(int thread) {
    uint32_t seen = 0;
    while (true) {
        job_.wait(kIdleSpins, [&](uint32_t job) {
            let_pass(thread);
            return job != seen;
        });
        seen = job_.value.load();
        if (stop_.load()) return;
        if (!enter()) continue;
        work(thread);
        leave();
    }
}

bool Pool::enter() {
    uint32_t inside = inside_.value.load();
    while (!(inside & kClosed))
        if (inside_.value.compare_exchange_weak(inside, inside + 1)) return true;
    return false;
}

void Pool::leave() {
    if (inside_.value.fetch_sub(1) == kClosed + 1) inside_.wake();
}

void Pool::let_pass(int thread) {
    const uint32_t visits = visits_.load(std::memory_order_relaxed);
    if (visits == let_pass_[thread]) return;
    let_pass_[thread] = visits;
    sched_yield();
}

void Pool::work(int thread) noexcept {
    let_pass(thread);
    turn.begin(now(), used());
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
    inside_.value.store(0);
    job_.value.fetch_add(1);
    job_.wake();
}

void Pool::finish() {
    State started = State::Started;
    if (!state_.compare_exchange_strong(started, State::Finishing)) throw std::logic_error("[pool] no job was started");
    {
        const OnCpu here(cpus_.empty() ? OnCpu::kAny : cpus_[0]);
        work(0);
        inside_.value.fetch_or(kClosed);
        inside_.wait(kSpins, [](uint32_t inside) { return inside == kClosed; });
    }
    const std::exception_ptr error = std::exchange(error_, nullptr);
    state_.store(State::Idle);
    if (error) std::rethrow_exception(error);
}

void Pool::parallel(int n, const std::function<void(int, int)>& body) {
    if (n == 1) {   // nothing to divide, so that nobody need be woken
        require_idle();
        return body(0, 1);
    }
    Claims claims;
    claims.reset(n, threads());
    const std::function<void(int)> claim = [&](int) {
        int begin, end;
        while (claims.next(begin, end)) body(begin, end);
    };
    start(claim);
    finish();
}

}  // namespace mill
