#include "tape.h"

#include "attend_phases.h"

#include <algorithm>
#include <stdexcept>

namespace mill {

Tape::Tape(std::shared_ptr<Pool> pool, const Kernels& kernels, const TapeShape& shape)
    : pool_(std::move(pool)), kernels_(kernels), shape_(shape), step_(shape_, kernels.attend_rows) {
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
    kv_ = shape_.shared ? Memory::shared(slot_bytes * slots) : Memory(slot_bytes * slots);
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
    step_.set_vocabulary(w->rows);
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

void Tape::attention(int layer, int out, int window) {
    const PageFormat& page = shape_.page;
    if (buffers_.at(out).width != shape_.heads * page.head_dim) refuse("attention output has the wrong width");
    const LayerPlace& place = layers_.at(layer);
    const AttendArgs a{kernels_, place, page, shape_.groups, layer, shape_.heads, shape_.kv_heads, step_.plan_for(window, place.groups), q_.data(), at(out), step_.partials(), sums_.as<float>()};
    size_t span = 0;
    for (const LinearPhase* op : before_attention_) span += op->bytes();
    size_t begin = 0;
    for (LinearPhase* op : before_attention_) {
        op->fetch = {place.slots.data(), nullptr, 0, page.head_bytes(), begin, span};
        op->fetch_plan = a.plan;
        begin += op->bytes();
    }
    before_attention_.clear();
    step_.fetch_ahead(span);
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

void Tape::launch(size_t first_phase) {
    first_phase_ = first_phase;
    counts_.resize(phases_.size());
    for (size_t i = first_phase; i < phases_.size(); ++i) {
        counts_[i] = phases_[i]->items(step_.state());
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
            phases_[i]->run(step_.state(), begin, end, scratch_[thread]);
            claims_[i]->done(end - begin);
        }
        claims_[i]->wait();
    }
}

void Tape::start(const Batch& batch) {
    pool_->require_idle();   // the step in flight may be this tape's
    step_.begin(batch);
    launch(0);
}

void Tape::finish() {
    if (!started_) throw std::logic_error("[tape] no step was started");
    started_ = false;
    pool_->finish();
    step_.end();
}

void Tape::rerun(std::span<const int32_t> outputs) {
    pool_->require_idle();
    step_.begin_again(outputs);
    launch(select_phase_);
    finish();
}

}  // namespace mill
