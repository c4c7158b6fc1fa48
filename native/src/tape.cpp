#include "tape.h"

#include "attend_phases.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mill {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[tape] " + what); }

// Rotary angles are exact up to here (rotary.h).
constexpr int kMaxPosition = 1 << 20;

}  // namespace

Tape::Tape(std::shared_ptr<Pool> pool, const Kernels& kernels, const TapeShape& shape)
    : pool_(std::move(pool)), kernels_(kernels), shape_(shape) {
    const PageFormat& page = shape.page;
    const int kv_heads = shape.kv_heads;
    if (page.head_dim % 16 || page.head_dim > 512 || page.head_dim < 16) refuse("head_dim is " + std::to_string(page.head_dim) + ", but must be a multiple of 16 up to 512");
    if (kv_heads < 1 || shape.heads % kv_heads) refuse("heads must be a multiple of kv_heads");
    if (page.group < 1 || page.group > page.head_dim || (page.group % 32 && page.group != page.head_dim)) refuse("a group has " + std::to_string(page.group) + " dims, but must have a multiple of 32, or head_dim");
    place_pairs();
    q_ = Memory(size_t(shape.max_rows) * shape.heads * page.query_bytes());
    sums_ = Memory(size_t(shape.max_rows) * shape.heads * 2 * sizeof(float));
    const size_t rows = std::max(shape.max_rows, shape.max_outputs), cols = shape.max_cols;
    dense_ = Memory(rows * (cols + kLanes - 1) / kLanes * kLanes * sizeof(float));
    const size_t tiles = (rows + kTile - 1) / kTile, outliers = rows * QuantRows::stride(int(cols));
    records_ = Memory(rows * (cols / 32) * kRecordBytes);
    used_ = Memory(tiles * QuantRows::words(int(cols)) * sizeof(uint64_t));
    outlier_at_ = Memory(outliers * sizeof(uint32_t));
    outlier_x_ = Memory(outliers * sizeof(float));
    slots_.resize(tiles);
    quant_ = {0, 0, records_.data(), used_.as<uint64_t>(), outlier_at_.as<uint32_t>(), outlier_x_.as<float>(), slots_.data(), 0};
    scratch_.resize(pool_->threads());
    for (auto& s : scratch_) {
        s.attend = std::make_unique<AttendScratch>();
        s.columns = Memory((cols + 1) * kLanes * sizeof(float));
        s.places = Memory(cols * sizeof(ColumnPlace));
        s.linear = {s.columns.as<float>(), s.places.as<ColumnPlace>()};
        s.frames.resize(kv_heads);
        s.o = Memory(sizeof(float) * kMaxAttendRows * page.head_dim);
        s.total = Memory(sizeof(float) * kMaxAttendRows * page.head_dim);
    }
}

// Every pair has one slot. The pool is as large as the largest group needs.
void Tape::place_pairs() {
    size_t slots = 0;
    for (const KVGroup& g : shape_.groups) slots = std::max(slots, g.pairs.size());
    const size_t slot_bytes = shape_.page.head_bytes() * shape_.frames, width = size_t(shape_.kv_heads) * shape_.page.head_dim;
    kv_ = Memory(slot_bytes * slots);
    layers_.resize(shape_.layers);
    for (LayerPlace& layer : layers_) layer = {std::vector<int>(shape_.kv_heads, -1), std::vector<uint8_t*>(shape_.kv_heads), std::vector<float>(width, 1.0f), std::vector<float>(width, 0.0f)};
    int placed = 0;
    for (size_t g = 0; g < shape_.groups.size(); ++g) {
        const KVGroup& group = shape_.groups[g];
        if (group.streaming.sinks < 0 || group.streaming.sinks % 16 || group.streaming.recent < 0 || group.streaming.recent % kFrame) refuse("sinks must be a multiple of 16, recent of 8");
        for (size_t i = 0; i < group.pairs.size(); ++i, ++placed) {
            const Pair& p = group.pairs[i];
            if (p.layer < 0 || p.layer >= shape_.layers || p.kv_head < 0 || p.kv_head >= shape_.kv_heads || layers_[p.layer].groups[p.kv_head] >= 0) refuse("a KV group names a head that there is not, or one twice");
            layers_[p.layer].groups[p.kv_head] = int(g);
            layers_[p.layer].slots[p.kv_head] = kv_.data() + slot_bytes * i;
        }
    }
    if (placed != shape_.layers * shape_.kv_heads) refuse("KV groups must name every head of every layer");
    look_back_.assign(shape_.groups.size(), 1);
}

Tape::~Tape() {
    if (started_) finish();
}

int Tape::add_buffer(int width, bool output_rows, bool plain) {
    const size_t rows = output_rows ? shape_.max_outputs : shape_.max_rows;
    Buffer b{{}, width, output_rows, plain};
    b.memory = Memory(rows * b.stride() * sizeof(float));
    buffers_.push_back(std::move(b));
    return int(buffers_.size()) - 1;
}

const float* Tape::buffer(int index) const {
    if (!buffers_.at(index).plain) refuse("only a plain buffer can be read");
    return buffers_[index].memory.as<float>();
}

Activations Tape::at(int index) const {
    const Buffer& b = buffers_.at(index);
    return {{b.memory.as<float>(), b.stride(), b.plain, 0}, b.output_rows};
}

template <class P, class... A> void Tape::push(A&&... args) {
    phases_.push_back(std::make_unique<P>(std::forward<A>(args)...));
    claims_.push_back(std::make_unique<Claims>());
}

int Tape::add_rope(std::vector<double> inverse) {
    if (int(inverse.size()) * 2 != shape_.page.head_dim) refuse("a rope needs head_dim / 2 frequencies");
    auto rope = std::make_unique<Rope>();
    const size_t bytes = inverse.size() * shape_.max_rows * sizeof(float);
    rope->inverse = std::move(inverse);
    rope->cos = Memory(bytes);
    rope->sin = Memory(bytes);
    push<AnglePhase>(rope->inverse, rope->cos.as<float>(), rope->sin.as<float>());
    ropes_.push_back(std::move(rope));
    return int(ropes_.size()) - 1;
}

void Tape::embed(std::shared_ptr<Weight> w, int out, float scale) {
    if (w->cols != buffers_[out].width) refuse("embedding width does not match its buffer");
    vocabulary_ = w->rows;
    for (auto& s : scratch_) s.row = Memory(buffers_[out].stride() * sizeof(float));
    push<EmbedPhase>(std::move(w), at(out), scale);
}

void Tape::linear(int x, std::vector<std::shared_ptr<Weight>> weights, int out, Norm norm, std::vector<float> bias, Out::Kind kind, Activation activation) {
    const int cols = buffers_.at(x).width;
    int outputs = 0;
    bool quantize = false, dense = false;
    for (const auto& w : weights) {
        if (outputs % kLanes && kind != Out::Gate) refuse("a weight has " + std::to_string(outputs) + " outputs before it, which must be a multiple of " + std::to_string(kLanes));
        if (w->cols != cols) refuse("a weight takes " + std::to_string(w->cols) + " inputs, its input has " + std::to_string(cols));
        outputs += w->rows;
        (traits(w->form).dense() ? dense : quantize) = true;
    }
    if (kind == Out::Gate) {
        if (weights.size() != 2 || weights[0]->rows != weights[1]->rows || !bias.empty()) refuse("a gated linear op takes two weights of equal shape and no bias");
        outputs /= 2;
    }
    if (outputs != buffers_.at(out).width) refuse("weights give " + std::to_string(outputs) + " outputs, the buffer holds " + std::to_string(buffers_[out].width));
    if (!bias.empty() && int(bias.size()) != outputs) refuse("bias has the wrong length");
    if (!norm.weight.empty() && int(norm.weight.size()) != cols) refuse("norm weight has the wrong length");
    if (buffers_[x].output_rows != buffers_[out].output_rows) refuse("input and output differ in rows");
    if (buffers_[x].plain) refuse("the input of a linear op lies in tiles");
    if (cols > shape_.max_cols) refuse("a linear op takes " + std::to_string(cols) + " inputs, the tape was made for " + std::to_string(shape_.max_cols));
    float* normed = dense && !norm.weight.empty() ? dense_.as<float>() : nullptr;
    if (quantize || normed) push<InputPhase>(kernels_, at(x), cols, std::move(norm.weight), norm.eps, normed, quantize ? &quant_ : nullptr);
    push<LinearPhase>(kernels_, std::move(weights), at(x), normed, &quant_, std::move(bias), at(out), kind, activation, uint16_t(inputs_++));
    before_attention_.push_back(static_cast<LinearPhase*>(phases_.back().get()));
}

void Tape::rotate_store(int qkv, int layer, int rope, float scale, bool interleaved, std::vector<float> q_norm, std::vector<float> k_norm, float eps) {
    if (buffers_[qkv].width != (shape_.heads + 2 * shape_.kv_heads) * shape_.page.head_dim) refuse("qkv has the wrong width");
    RotateArgs a{};
    a.page = shape_.page;
    a.eps = eps;
    a.scale = scale;
    a.heads = shape_.heads;
    a.kv_heads = shape_.kv_heads;
    a.interleaved = interleaved;
    Rope& r = *ropes_.at(rope);
    push<RotatePhase>(kernels_, a, std::move(q_norm), std::move(k_norm), at(qkv), r.cos.as<float>(), r.sin.as<float>(), q_.data(), layers_.at(layer));
}

void Tape::calibrate(int layer, std::vector<float> factor, std::vector<float> zero) {
    LayerPlace& place = layers_.at(layer);
    if (factor.size() != place.factor.size() || zero.size() != place.zero.size()) refuse("a calibration has the wrong shape");
    for (float f : factor)
        if (!(f > 0.0f)) refuse("a factor of keys is " + std::to_string(f) + ", but must be above 0");
    place.factor = std::move(factor);
    place.zero = std::move(zero);
}

int Tape::plan_for(int window, const std::vector<int>& groups) {
    for (size_t i = 0; i < state_.plans.size(); ++i)
        if (state_.plans[i].window == window && state_.plans[i].groups == groups) return int(i);
    state_.plans.push_back({window, groups, {}, {}, {}});
    return int(state_.plans.size()) - 1;
}

void Tape::attention(int layer, int out, int window) {
    const PageFormat& page = shape_.page;
    if (buffers_.at(out).width != shape_.heads * page.head_dim) refuse("attention output has the wrong width");
    const LayerPlace& place = layers_.at(layer);
    for (int g : place.groups) look_back_[g] = window && look_back_[g] ? std::max(window, look_back_[g]) : 0;
    const AttendArgs a{kernels_, place, page, shape_.groups, layer, shape_.heads, shape_.kv_heads, plan_for(window, place.groups), q_.data(), at(out), partials_, sums_.as<float>()};
    size_t span = 0;
    for (const LinearPhase* op : before_attention_) span += op->bytes();
    size_t begin = 0;
    for (LinearPhase* op : before_attention_) {
        op->fetch = {place.slots.data(), nullptr, 0, page.head_bytes(), begin, span};
        op->fetch_plan = a.plan;
        begin += op->bytes();
    }
    before_attention_.clear();
    longest_fetch_ = std::max(longest_fetch_, span);
    push<AttendPhase>(a);
    push<MergePhase>(a);
    push<WeighPhase>(a);
}

void Tape::add_norm(int x, int y, std::vector<float> weight, float eps) {
    if (buffers_.at(x).width != buffers_.at(y).width || int(weight.size()) != buffers_[x].width) refuse("add_norm has unequal widths");
    if (buffers_[x].plain || buffers_[y].plain) refuse("add_norm works on tiles");
    push<AddNormPhase>(kernels_, at(x), at(y), std::move(weight), eps);
}

void Tape::select(int x, int out) {
    if (buffers_.at(x).width != buffers_.at(out).width || buffers_[x].output_rows || !buffers_[out].output_rows) refuse("select has unequal buffers");
    if (select_phase_ == 0) select_phase_ = phases_.size();
    push<SelectPhase>(at(x), at(out));
}

// Rows of a segment that share a kv head are stacked (token-major) and cut into blocks. A decoding row with several cuts is an item per
// cut, so that a long context is spread over the threads; a block of a longer run goes through its cuts itself.
void Tape::plan_attention(AttendPlan& plan, int& partials) {
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
            for (int at = 0; at < stacked; at += kernels_.attend_rows) {
                const int count = std::min(kernels_.attend_rows, stacked - at);
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

void Tape::plan_fetching(AttendPlan& plan) {
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

void Tape::plan_weighing() {
    state_.weighed.clear();
    const auto segments = state_.batch.segments;
    for (int i = 0; i < int(segments.size()); ++i)
        for (int head = 0; segments[i].weigh >= 0 && head < shape_.kv_heads; ++head)
            state_.weighed.push_back({i, 0, segments[i].rows * (shape_.heads / shape_.kv_heads), head, -1, 0});
}

// A step outlives the call that begins it, and its input must not change after it was checked.
Batch Tape::keep(const Batch& batch) {
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
void Tape::check_pages(const Segment& s, const PageTable& table, int group) {
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

void Tape::prepare(const Batch& batch) {
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

void Tape::choose_outputs(std::span<const int32_t> outputs, int rows) {
    if (int(outputs.size()) > shape_.max_outputs) refuse("step wants " + std::to_string(outputs.size()) + " outputs, the tape holds " + std::to_string(shape_.max_outputs));
    for (int32_t o : outputs)
        if (o < 0 || o >= rows) refuse("output row outside the step");
    state_.batch.outputs = outputs;
    state_.outputs = int(outputs.size());
}

void Tape::launch(size_t first_phase) {
    first_phase_ = first_phase;
    ++state_.step;
    counts_.resize(phases_.size());
    for (size_t i = first_phase; i < phases_.size(); ++i) {
        counts_[i] = phases_[i]->items(state_);
        claims_[i]->reset(counts_[i], pool_->threads());
    }
    pool_->start(walk_);
    started_ = true;
}

// No phase throws: what it needs was allocated before. A thread that comes late finds nothing left of the phases that the others have done.
void Tape::walk(int thread) noexcept {
    for (size_t i = first_phase_; i < phases_.size(); ++i) {
        if (counts_[i] == 0) continue;
        int begin, end;
        while (claims_[i]->next(begin, end)) {
            phases_[i]->run(state_, begin, end, scratch_[thread]);
            claims_[i]->done(end - begin);
        }
        claims_[i]->wait();
    }
}

void Tape::start(const Batch& batch) {
    pool_->require_idle();   // the step in flight may be this tape's
    state_.rows = 0;         // nothing to rerun if this step is refused
    prepare(keep(batch));
    launch(0);
}

void Tape::finish() {
    if (!started_) throw std::logic_error("[tape] no step was started");
    started_ = false;
    pool_->finish();
    state_.batch = {};
    weights_.clear();
}

void Tape::rerun(std::span<const int32_t> outputs) {
    pool_->require_idle();
    choose_outputs(outputs, state_.rows);
    launch(select_phase_);
    finish();
}

}  // namespace mill
