// How long a thread computes on a CPU that it shares with something else.
#pragma once

#include <chrono>

namespace mill {

// A thread that the system puts aside in the middle of a run holds all others up until it is back. So one that has been put aside gives its CPU
// away itself, between two runs, before the system does it again: after half of the time for which it was away, since turns are about equally long.
// Times are the clock's, and what the thread has used of its CPU.
class Turn {
public:
    using Time = std::chrono::nanoseconds;

    // From here on, time away is time put aside: the thread has just been called, or has slept because it wanted to.
    void begin(Time now, Time used) {
        seen_ = now;
        used_ = used;
        look_ = now + kLook;
    }

    // Whether it is time to ask the system what the thread has used, which costs more than to read the clock.
    bool due(Time now) const { return now >= look_; }

    // Whether to give the CPU away now; gave_way() says what came of it.
    bool over(Time now, Time used) {
        if (put_aside(now, used)) shared_ = true;   // and a new turn has just begun
        return shared_ && now >= ends_;
    }

    // Nobody was waiting for the CPU if it came back at once.
    void gave_way(Time now, Time used) { shared_ = put_aside(now, used); }

private:
    static constexpr Time kLook = std::chrono::microseconds(500);
    static constexpr Time kAside = std::chrono::microseconds(300);   // an interrupt takes less, the turn of another thread more

    bool put_aside(Time now, Time used) {
        const Time away = (now - seen_) - (used - used_);
        begin(now, used);
        if (away < kAside) return false;
        ends_ = now + away / 2;
        return true;
    }

    bool shared_ = false;   // whether something else wants this CPU too
    Time seen_{}, used_{}, look_{}, ends_{};
};

}  // namespace mill
