// One set of threads for all native work. The caller is thread 0; the others spin, then yield, then sleep.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mill {

// Hands out [0, n) in runs, and knows when all of them are done. Which thread computes an item never changes the item's result.
class Claims {
public:
    void reset(int n, int threads);
    bool next(int& begin, int& end);
    // A run that next() gave is computed.
    void done(int items) { done_.fetch_add(items, std::memory_order_acq_rel); }
    // Returns when all items are done, whoever did them: a thread that the system has put aside between two runs holds nobody up.
    void wait() const;

private:
    int n_ = 0, threads_ = 1;
    alignas(64) std::atomic<int> at_{0};
    alignas(64) std::atomic<int> done_{0};
};

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int threads() const { return int(workers_.size()) + 1; }

    // Gives a job to the other threads and returns at once; `body` must live until finish(). Between the two the pool can do nothing else: a
    // second start, and what starts in turn (run, parallel), throws std::logic_error.
    void start(const std::function<void(int)>& body);
    // Joins the job as thread 0 and returns when body(thread) has returned on every thread. What a body threw is rethrown here; the pool is idle
    // again either way. Throws std::logic_error when nothing was started.
    void finish();
    // Throws std::logic_error between start() and finish().
    void require_idle() const;

    // Runs body(thread) on every thread and returns when all are done.
    void run(const std::function<void(int)>& body);

    // Runs body(begin, end) over [0, n), divided between the threads.
    void parallel(int n, const std::function<void(int, int)>& body);

private:
    enum class State { Idle, Started, Finishing };

    void serve(int thread);
    void work(int thread) noexcept;

    const std::function<void(int)>* body_ = nullptr;
    std::atomic<State> state_{State::Idle};
    std::mutex lock_;
    std::exception_ptr error_;   // the first that a body threw, under lock_
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<int> busy_{0};   // workers that are still at the job
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace mill
