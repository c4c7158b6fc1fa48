// A thread in runs of 0.3 ms on a simulated CPU: how often it is put aside in the middle of a run, and how often it gives way.
#include "turn.h"

#include <cstdio>
#include <cstdlib>

using mill::Turn;
using Time = Turn::Time;
using namespace std::chrono_literals;

namespace {

struct Cpu {
    Time slice;             // the system changes threads after so long; 0: this thread has the CPU for itself
    Time now = 5s, used = 1s, since = now;
    int aside = 0, given = 0;

    void change() {
        now += slice;
        since = now;
    }
    void run(Time length) {
        while (slice > 0s && now - since + length > slice) {   // the tick comes in the middle
            const Time part = slice - (now - since);
            now += part, used += part, length -= part;
            ++aside;
            change();
        }
        now += length, used += length;
    }
};

void runs(Turn& turn, Cpu& cpu, int count) {
    cpu.aside = cpu.given = 0;
    for (int i = 0; i < count; ++i) {
        if (turn.due(cpu.now) && turn.over(cpu.now, cpu.used)) {
            ++cpu.given;
            if (cpu.slice > 0s) cpu.change();
            turn.gave_way(cpu.now, cpu.used);
        }
        cpu.run(300us);
    }
}

void require(bool ok, const char* what, const Cpu& cpu) {
    if (ok) return;
    std::printf("not so: %s (put aside %d times, gave way %d times)\n", what, cpu.aside, cpu.given);
    std::exit(1);
}

}  // namespace

int main() {
    for (Time slice : {1ms, 3ms, 4ms, 10ms}) {
        Turn turn;
        Cpu cpu{0s};
        turn.begin(cpu.now, cpu.used);
        runs(turn, cpu, 1000);
        require(cpu.given == 0, "a thread that has its CPU for itself keeps it", cpu);
        cpu.slice = slice;
        cpu.since = cpu.now;
        runs(turn, cpu, 1000);
        require(cpu.aside <= 1 && cpu.given > 10, "a thread that was put aside once gives way before it happens again", cpu);
        cpu.slice = 0s;
        runs(turn, cpu, 1000);
        require(cpu.given <= 1, "it stops when nobody wants the CPU any more", cpu);
        cpu.now += 20ms;
        turn.begin(cpu.now, cpu.used);
        runs(turn, cpu, 1000);
        require(cpu.given == 0, "sleep of its own is not being put aside", cpu);
    }
}
