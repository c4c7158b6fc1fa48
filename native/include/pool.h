// One set of threads for all native work. The caller is thread 0. Who waits spins, then sleeps; nobody waits for a thread that has nothing to finish.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mill {

// A number that threads wait for. They spin at first and then sleep: never by sched_yield, with which Linux takes the thread's fair share away.
class Awaited {
public:
    explicit Awaited(uint32_t value = 0) : value(value) {}

    std::atomic<uint32_t> value;
    // Returns when done(value).
    template <class Done> void wait(int spins, Done done);
    // Wakes those that sleep, after the value has changed. Without sleepers it costs nothing.
    void wake();

private:
    std::atomic<int> sleepers_{0};
};

// Hands out [0, n) in runs, and knows when all of them are done. Which thread computes an item never changes the item's result.
class Claims {
public:
    void reset(int n, int threads);
    bool next(int& begin, int& end);
    // A run that next() gave is computed.
    void done(int items);
    // Returns when all items are done, whoever did them: a thread that the system has put aside between two runs holds nobody up.
    void wait();

private:
    uint32_t n_ = 0, threads_ = 1;
    alignas(64) std::atomic<uint32_t> at_{0};
    alignas(64) Awaited done_;
};

class Pool {
public:
    // cpus: for each thread the CPU that it is kept on, the caller's first, or none. The caller is kept there only in finish(): what its program
    // does otherwise, and threads that it starts, go where they like. Throws std::invalid_argument for a CPU that the system refuses.
    explicit Pool(int threads, std::vector<int> cpus = {});
    ~Pool();
    Pool(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }

    // Gives a job to the other threads and returns at once; `body` must live until finish(). Between the two the pool can do nothing else: a
    // second start, and what starts in turn (parallel), throws std::logic_error.
    void start(const std::function<void(int)>& body);
    // Joins the job as thread 0 and returns when body(0) and every body(thread) that has begun have returned: a body returns when nothing is left
    // to do, and a thread that comes later need not begin. What a body threw is rethrown here; the pool is idle again either way. Throws
    // std::logic_error when nothing was started.
    void finish();
    // Has every thread give its CPU away once, when it has no work in its hands: at once if it waits for a job, else before its part in the next
    // one. To be called when somebody has just been woken who may want a CPU.
    void give_way() { visits_.fetch_add(1, std::memory_order_relaxed); }
    // Throws std::logic_error between start() and finish().
    void require_idle() const;

    // Runs body(begin, end) over [0, n), divided between the threads.
    void parallel(int n, const std::function<void(int, int)>& body);

private:
    enum class State { Idle, Started, Finishing };
    static constexpr uint32_t kClosed = 1u << 31;

    void end_workers();
    void serve(int thread);
    void work(int thread) noexcept;
    bool enter();
    void leave();
    void let_pass(int thread);

    const std::vector<int> cpus_;
    const std::function<void(int)>* body_ = nullptr;
    std::atomic<State> state_{State::Idle};
    std::mutex lock_;
    std::exception_ptr error_;   // the first that a body threw, under lock_
    alignas(64) Awaited job_;
    alignas(64) Awaited inside_{kClosed};   // other threads that are at the job; kClosed: none may begin any more
    std::atomic<bool> stop_{false};
    std::atomic<uint32_t> visits_{0};   // calls of give_way()
    std::vector<uint32_t> let_pass_;    // how many of them each thread has followed
    std::vector<std::thread> workers_;
};

}  // namespace mill
