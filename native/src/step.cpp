#include "step.h"

#include "attend_phases.h"

#include <algorithm>
#include <stdexcept>

namespace mill {
namespace {

// Rotary angles are exact up to here (rotary.h).
constexpr int kMaxPosition = 1 << 20;

}  // namespace

void refuse(const std::string& what) { throw std::invalid_argument("[tape] " + what); }

Step::Step(const TapeShape& shape, int attend_rows) : shape_(shape), attend_rows_(attend_rows), look_back_(shape.groups.size(), 1) {}

int Step::plan_for(int window, const std::vector<int>& groups) {
    for (int g : groups) look_back_[g] = window && look_back_[g] ? std::max(window, look_back_[g]) : 0;
    for (size_t i = 0; i < state_.plans.size(); ++i)
        if (state_.plans[i].window == window && state_.plans[i].groups == groups) return int(i);
    state_.plans.push_back({window, groups, {}, {}, {}});
    return int(state_.plans.size()) - 1;
}

void Step::fetch_ahead(size_t bytes) { longest_fetch_ = std::max(longest_fetch_, bytes); }

void Step::begin(const Batch& batch) {
    state_.rows = 0;   // nothing to begin again if this step is refused
    prepare(keep(batch));
    ++state_.step;
}

void Step::begin_again(std::span<const int32_t> outputs) {
    choose_outputs(outputs, state_.rows);
    ++state_.step;
}

void Step::end() {
    state_.batch = {};
    weights_.clear();
}

// A step outlives the call that begins it, and its input must not change after it was checked.
Batch Step::keep(const Batch& batch) {
    numbers_.clear();
    for (const auto& part : {batch.tokens, batch.frames, batch.starts, batch.outputs}) numbers_.insert(numbers_.end(), part.begin(), part.end());
    segments_.assign(batch.segments.begin(), batch.segments.end());
    tables_.assign(batch.tables.begin(), batch.tables.end());
    weights_.assign(batch.weights.begin(), batch.weights.end());
    std::span<const int32_t> rest(numbers_);
    auto next = [&](size_t n) {
        const auto part = rest.first(n);
        rest = rest.subspan(n);
        return part;
    };
    const auto tokens = next(batch.tokens.size()), frames = next(batch.frames.size()), starts = next(batch.starts.size());
    return {tokens, segments_, tables_, frames, starts, rest, weights_};
}

// Of a segment in one group: that its rows have frames to write to, which state_ is told, and that all extents are in the pool or holes.
void Step::check_pages(const Segment& s, const PageTable& table, int group) {
    const Batch& batch = state_.batch;
    if (table.extents < 1 || table.extent < 0 || size_t(table.extent) + table.extents > batch.frames.size()) refuse("a segment has no pages");
    const int32_t* starts = batch.starts.data() + table.extent;
    const int32_t* frames = batch.frames.data() + table.extent;
    if (first_visible(s.position, look_back_[group]) / kFrame < starts[0]) refuse("a segment's pages begin after what its rows see");
    int32_t* to = state_.frame.data() + size_t(group) * batch.tokens.size() + s.row;
    int e = 0;
    for (int i = 0; i < s.rows; ++i) {
        const int number = (s.position + i) / kFrame;
        while (e + 1 < table.extents && starts[e + 1] <= number) ++e;
        const int64_t frame = int64_t(frames[e]) + number - starts[e];
        if (frames[e] == -1) refuse("a position that is written lies in a hole");
        if (number < starts[e] || frame < 0 || frame >= shape_.frames) refuse("a position lies outside the pool");
        to[i] = int(frame);
    }
    for (int i = 0; i < table.extents; ++i) {
        const int64_t next = i + 1 < table.extents ? starts[i + 1] : (s.position + s.rows - 1) / kFrame + 1;
        const int64_t length = std::max<int64_t>(0, next - starts[i]);
        if (i + 1 < table.extents && length == 0) refuse("extents are out of order");
        if (frames[i] != -1 && (frames[i] < 0 || frames[i] + length > shape_.frames)) refuse("an extent lies outside the pool");
    }
}

void Step::prepare(const Batch& batch) {
    const int rows = int(batch.tokens.size()), groups = int(shape_.groups.size());
    if (rows > shape_.max_rows) refuse("step has " + std::to_string(rows) + " rows, the tape holds " + std::to_string(shape_.max_rows));
    if (batch.frames.size() != batch.starts.size()) refuse("extents differ in length");
    for (int32_t t : batch.tokens)
        if (t < 0 || t >= vocabulary_) refuse("token " + std::to_string(t) + " is outside the vocabulary of " + std::to_string(vocabulary_));
    choose_outputs(batch.outputs, rows);
    state_.batch = batch;
    state_.position.resize(rows);
    state_.frame.resize(size_t(rows) * groups);
    int row = 0;
    size_t table = 0, weighed = 0;
    for (const Segment& s : batch.segments) {
        if (s.row != row || s.rows < 1 || s.rows > rows - row || s.position < 0) refuse("segments must cover the rows in order");
        if (s.position > kMaxPosition - s.rows) refuse("positions end at " + std::to_string(kMaxPosition));
        if (s.tables != groups || table + groups > batch.tables.size()) refuse("a segment has " + std::to_string(s.tables) + " page tables, but there are " + std::to_string(groups) + " KV groups");
        for (int g = 0; g < groups; ++g) check_pages(s, batch.tables[table++], g);
        for (int i = 0; i < s.rows; ++i) state_.position[row++] = s.position + i;
        if (s.weigh < -1 || (s.weigh >= 0 && size_t(s.weigh) != weighed++)) refuse("segments must name weights in order");
        if (s.weigh >= 0 && (weighed > batch.weights.size() || batch.weights[s.weigh].frames <= (s.position + s.rows - 1) / kFrame)) refuse("there is no room for a segment's weights");
    }
    if (row != rows) refuse("segments must cover the rows in order");
    state_.rows = rows;
    int partials = 0;
    for (AttendPlan& plan : state_.plans) {
        int used = 0;
        plan_attention(plan, used);
        plan_fetching(plan);
        partials = std::max(partials, used);
    }
    plan_weighing();
    const size_t bytes = sizeof(float) * kMaxAttendRows * size_t(partials);
    if (2 * bytes > partial_m_.size()) {
        partial_m_ = Memory(4 * bytes);
        partial_o_ = Memory(2 * bytes * shape_.page.head_dim);
        partials_ = {partial_m_.as<float>(), partial_o_.as<float>()};
    }
}

void Step::choose_outputs(std::span<const int32_t> outputs, int rows) {
    if (int(outputs.size()) > shape_.max_outputs) refuse("step wants " + std::to_string(outputs.size()) + " outputs, the tape holds " + std::to_string(shape_.max_outputs));
    for (int32_t o : outputs)
        if (o < 0 || o >= rows) refuse("output row outside the step");
    state_.batch.outputs = outputs;
    state_.outputs = int(outputs.size());
}

// Rows of a segment that share a kv head are stacked (token-major) and cut into blocks. A decoding row with several cuts is an item per
// cut, so that a long context is spread over the threads; a block of a longer run goes through its cuts itself.
void Step::plan_attention(AttendPlan& plan, int& partials) {
    plan.items.clear();
    plan.merges.clear();
    const int group = shape_.heads / shape_.kv_heads;
    const auto segments = state_.batch.segments;
    for (int i = 0; i < int(segments.size()); ++i) {
        const Segment& s = segments[i];
        const int stacked = s.rows * group;
        for (int head = 0; head < shape_.kv_heads; ++head) {
            const Sight sight(s, plan.window, shape_.groups[plan.groups[head]].streaming);
            const int first_cut = sight.lo(s.position) / kCut, last_cut = s.position / kCut;
            for (int at = 0; at < stacked; at += attend_rows_) {
                const int count = std::min(attend_rows_, stacked - at);
                if (s.rows > 1 || first_cut == last_cut) {
                    plan.items.push_back({i, at, count, head, -1, 0});
                    continue;
                }
                const int first_partial = partials;
                for (int c = first_cut; c <= last_cut; ++c)
                    if (sight.sees(c, sight.recent(s.position))) plan.items.push_back({i, at, count, head, c, partials++});
                plan.merges.push_back({i, at, count, head, partials - first_partial, first_partial});
            }
        }
    }
}

void Step::plan_fetching(AttendPlan& plan) {
    const size_t tiles = tiles_of(state_.rows), most = tiles ? (tiles - 1) * longest_fetch_ / shape_.page.head_bytes() : 0;
    plan.frames.clear();
    const PageTable* tables = state_.batch.tables.data();
    for (const Segment& s : state_.batch.segments) {
        for (int head = 0; head < shape_.kv_heads; ++head) {
            const PageTable& table = tables[plan.groups[head]];
            const int32_t* starts = state_.batch.starts.data() + table.extent;
            const int32_t* frames = state_.batch.frames.data() + table.extent;
            const Sight sight(s, plan.window, shape_.groups[plan.groups[head]].streaming);
            const int gap = sight.sinks / kFrame, after = sight.recent(s.position) / kFrame;
            int e = 0;
            for (int f = sight.lo(s.position) / kFrame; f <= (s.position + s.rows - 1) / kFrame; ++f) {
                if (f >= gap && f < after) f = after;
                while (e + 1 < table.extents && starts[e + 1] <= f) ++e;
                if (frames[e] < 0) continue;
                if (plan.frames.size() >= most) return;
                plan.frames.push_back({head, frames[e] + f - starts[e]});
            }
        }
        tables += shape_.groups.size();
    }
}

void Step::plan_weighing() {
    state_.weighed.clear();
    const auto segments = state_.batch.segments;
    for (int i = 0; i < int(segments.size()); ++i)
        for (int head = 0; segments[i].weigh >= 0 && head < shape_.kv_heads; ++head)
            state_.weighed.push_back({i, 0, segments[i].rows * (shape_.heads / shape_.kv_heads), head, -1, 0});
}

}  // namespace mill
