// What one step is given and how its work is laid out. Phases read it (phases.h); the tape executes them.
#pragma once

#include "kernels.h"

#include <memory>
#include <span>
#include <string>
#include <vector>

namespace mill {

// Throws std::invalid_argument: what a tape cannot record or execute.
[[noreturn]] void refuse(const std::string& what);

// After its sparsification a sequence sees of a streaming group the first `sinks` positions and the last `recent` ones. 0, 0: everything.
struct Streaming {
    int sinks, recent;
};

struct Pair {
    int layer, kv_head;
};

// Pair i of a group lies in slot i of the pool; frames are numbered once for all groups.
struct KVGroup {
    std::vector<Pair> pairs;
    Streaming streaming;
};

struct TapeShape {
    int max_rows, max_outputs, max_cols, frames;   // max_cols: inputs of the widest linear op
    int layers, heads, kv_heads;
    PageFormat page;
    std::vector<KVGroup> groups;
    bool shared = false;   // the pool is memory that other processes can map
};

struct Segment {
    int row, rows, position, tables;   // tables: how many page tables it has, which follow those of the segments before it
    int sparse, weigh;                 // weigh: where its attention weights go, or -1
};

// The extents of a sequence in one KV group, among those of the batch.
struct PageTable {
    int extent, extents;
};

// int64 [layers * kv heads][frames] of a sequence.
struct FrameWeights {
    int64_t* data;
    int frames;
    std::shared_ptr<void> owner;   // of the data, until the step is finished
};

// One step's input; see kernels/ops.py. The tape copies what the spans show.
struct Batch {
    std::span<const int32_t> tokens;
    std::span<const Segment> segments;
    std::span<const PageTable> tables;
    std::span<const int32_t> frames, starts;   // extents of all tables; a frame of -1: a hole
    std::span<const int32_t> outputs;
    std::span<const FrameWeights> weights;
};

// Up to kMaxAttendRows (token, head of the group) rows of one segment for one kv head; `cut` < 0: all cuts.
struct AttendItem {
    int segment, first, count, kv_head, cut, partial;
};

// The row blocks of attention ops that have a window and whose kv heads are in certain groups, laid out anew for every step.
struct AttendPlan {
    int window;                       // 0: none
    std::vector<int> groups;          // of each kv head
    std::vector<AttendItem> items;    // phase one
    std::vector<AttendItem> merges;   // phase two: `cut` is the number of partials, from `partial` on
    std::vector<FetchFrame> frames;   // the first of those that are read, in that order; no more than can be fetched ahead
};

// What all phases of a step share.
struct StepState {
    Batch batch;
    int rows = 0, outputs = 0;
    uint64_t step = 0;                         // counts
    std::vector<int32_t> position, frame;      // per token row; frame: [groups][rows], number in the pool
    std::vector<AttendPlan> plans;
    std::vector<AttendItem> weighed;           // all rows of a segment whose weights are wanted, per kv head
};

// Results of cuts that different threads computed for one row: m and l [partials][2][kMaxAttendRows], o [partials][kMaxAttendRows][head_dim].
struct Partials {
    float *m, *o;
};

// The owner of a step's state: keeps its input, refuses what does not fit the tape, and lays attention out in items.
class Step {
public:
    // shape: stays where it is. attend_rows: of an item.
    Step(const TapeShape& shape, int attend_rows);

    // While ops are recorded: what steps will have to look at.
    void set_vocabulary(int tokens) { vocabulary_ = tokens; }
    int plan_for(int window, const std::vector<int>& groups);   // of an attention op, its number; groups: of each kv head
    void fetch_ahead(size_t bytes);                             // of the linear ops before an attention, per tile of rows

    // Keeps a copy of the batch and lays it out. Throws std::invalid_argument if it does not fit; there is nothing to begin again then.
    void begin(const Batch& batch);
    // Other rows of the step that was begun last. Throws std::invalid_argument.
    void begin_again(std::span<const int32_t> outputs);
    // The batch is not looked at any more.
    void end();

    const StepState& state() const { return state_; }
    const Partials& partials() const { return partials_; }      // room for what the steps so far needed

private:
    Batch keep(const Batch& batch);
    void prepare(const Batch& batch);
    void check_pages(const Segment& segment, const PageTable& table, int group);
    void choose_outputs(std::span<const int32_t> outputs, int rows);
    void plan_attention(AttendPlan& plan, int& partials);
    void plan_fetching(AttendPlan& plan);
    void plan_weighing();

    const TapeShape& shape_;
    const int attend_rows_;
    int vocabulary_ = 0;
    size_t longest_fetch_ = 0;         // bytes that the linear ops before some attention fetch per tile of rows
    std::vector<int> look_back_;       // of each group: the widest window, 0: without end
    StepState state_;
    std::vector<int32_t> numbers_;     // what state_.batch shows, and
    std::vector<Segment> segments_;
    std::vector<PageTable> tables_;
    std::vector<FrameWeights> weights_;
    Memory partial_m_, partial_o_;
    Partials partials_{};
};

}  // namespace mill
