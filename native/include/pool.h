// One set of threads for all native work. The caller is thread 0; the others spin, then yield, then sleep.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace mill {

// A barrier for threads that are expected to arrive within microseconds of each other.
class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}
    void wait();

private:
    const int threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
};

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

    // Runs body(thread) on every thread and returns when all are done. Not reentrant; one caller at a time.
    void run(const std::function<void(int)>& body);

    // Runs body(begin, end) over [0, n), divided between the threads. An exception from the body is rethrown here.
    void parallel(int n, const std::function<void(int, int)>& body);

private:
    void serve(int thread);

    Barrier barrier_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace mill
