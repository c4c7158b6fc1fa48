#include "tape.h"

#include "rotary.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mill {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("[tape] " + what); }

// Rotary angles are exact up to here (rotary.h).
constexpr int kMaxPosition = 1 << 20;

int first_visible(int position, int window) { return window ? std::max(0, position - window + 1) : 0; }

struct EmbedPhase final : Phase {
    std::shared_ptr<Weight> w;
    float* out;
    float scale;
    EmbedPhase(std::shared_ptr<Weight> w, float* out, float scale) : w(std::move(w)), out(out), scale(scale) {}
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        for (int row = begin; row < end; ++row) {
            float* to = out + size_t(row) * w->cols;
            dequantize_row(*w, s.batch.tokens[row], to);
            if (scale != 1.0f)
                for (int i = 0; i < w->cols; ++i) to[i] *= scale;
        }
    }
};

struct AnglePhase final : Phase {
    const std::vector<double>& inverse;
    float *cos, *sin;
    AnglePhase(const std::vector<double>& inverse, float* cos, float* sin) : inverse(inverse), cos(cos), sin(sin) {}
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        const size_t n = inverse.size();
        for (int row = begin; row < end; ++row)
            for (size_t i = 0; i < n; ++i) sin_cos(double(s.position[row]) * inverse[i], sin[row * n + i], cos[row * n + i]);
    }
};

// The prologue of a linear op, and the quantisation of its result.
struct InputPhase final : Phase {
    const Kernels& k;
    const float* x;
    int width, cols;
    bool output_rows, quantize;
    Tape::Prologue prologue;
    float* dense;              // [rows][cols]; the prologue's result
    const QuantRows* quant;
    InputPhase(const Kernels& k, const float* x, int width, int cols, bool output_rows, bool quantize, Tape::Prologue p, float* dense, const QuantRows* quant)
        : k(k), x(x), width(width), cols(cols), output_rows(output_rows), quantize(quantize), prologue(std::move(p)), dense(dense), quant(quant) {}
    int items(const StepState& s) const override { return output_rows ? s.outputs : s.rows; }
    void run(const StepState&, int begin, int end, ThreadScratch&) override {
        QuantRows to = *quant;
        to.cols = cols;
        for (int row = begin; row < end; ++row) {
            const float* from = x + size_t(row) * width;
            float* y = dense + size_t(row) * cols;
            if (prologue.kind == Tape::Prologue::Norm) k.rms_norm(from, prologue.weight.data(), prologue.eps, cols, y);
            else if (prologue.kind == Tape::Prologue::Gate) k.gated(prologue.activation, from, from + cols, cols, y);
            if (quantize) k.quantize(prologue.kind == Tape::Prologue::None ? from : y, row, to);
        }
    }
};

struct LinearPhase final : Phase {
    const Kernels& k;
    std::vector<std::shared_ptr<Weight>> weights;
    std::vector<int> first_item, first_output;
    const float* x;            // dense input
    size_t x_stride;
    const QuantRows* quant;
    std::vector<float> bias;
    Out out;
    bool output_rows;
    int total = 0;
    LinearPhase(const Kernels& k, std::vector<std::shared_ptr<Weight>> ws, const float* x, size_t x_stride, const QuantRows* quant, std::vector<float> b, Out out, bool output_rows)
        : k(k), weights(std::move(ws)), x(x), x_stride(x_stride), quant(quant), bias(std::move(b)), out(out), output_rows(output_rows) {
        int outputs = 0;
        for (const auto& w : weights) {
            first_item.push_back(total);
            first_output.push_back(outputs);
            total += (w->panels() + 1) / 2;
            outputs += w->rows;
        }
    }
    int items(const StepState& s) const override { return (output_rows ? s.outputs : s.rows) ? total : 0; }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const int rows = output_rows ? s.outputs : s.rows;
        size_t which = 0;
        for (int item = begin; item < end; ++item) {
            while (which + 1 < weights.size() && item >= first_item[which + 1]) ++which;
            const Weight& w = *weights[which];
            const int panel = 2 * (item - first_item[which]);
            const int count = std::min(2, w.panels() - panel);
            Out to = out;
            to.out += first_output[which];
            to.bias = bias.empty() ? nullptr : bias.data() + first_output[which];
            if (traits(w.form).dense()) {
                k.linear_dense(w, panel, count, x, x_stride, 0, rows, to);
            } else {
                QuantRows from = *quant;
                from.cols = w.cols;
                k.linear_quant(w, panel, count, from, 0, rows, to, scratch.unpacked.data());
            }
        }
    }
};

struct RotatePhase final : Phase {
    const Kernels& k;
    RotateArgs args;
    std::vector<float> q_norm, k_norm;
    const float *qkv, *cos, *sin;
    size_t qkv_width;
    uint16_t* q;
    uint8_t* layer;
    PageFormat page;
    RotatePhase(const Kernels& k, RotateArgs a, std::vector<float> qn, std::vector<float> kn, const float* qkv, size_t width, const float* cos, const float* sin, uint16_t* q, uint8_t* layer, PageFormat page)
        : k(k), args(a), q_norm(std::move(qn)), k_norm(std::move(kn)), qkv(qkv), cos(cos), sin(sin), qkv_width(width), q(q), layer(layer), page(page) {
        args.q_norm = q_norm.empty() ? nullptr : q_norm.data();
        args.k_norm = k_norm.empty() ? nullptr : k_norm.data();
    }
    int items(const StepState& s) const override { return s.rows; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        RotateArgs a = args;
        const size_t half = a.head_dim / 2;
        for (int row = begin; row < end; ++row) {
            a.qkv = qkv + row * qkv_width;
            a.cos = cos + row * half;
            a.sin = sin + row * half;
            a.q = q + size_t(row) * a.heads * a.head_dim;
            a.frame = layer + size_t(s.frame[row]) * page.frame_bytes();
            a.slot = s.position[row] % kFrame;
            k.rotate_store(a);
        }
    }
};

struct AttendArgs {
    const Kernels& k;
    const uint8_t* layer;
    PageFormat page;
    int heads, plan;
    const uint16_t* q;
    float* out;
    size_t out_width;
    const Partials& partials;
};

// Rows of an item, and where each one's output goes.
struct ItemRows {
    VisibleRow rows[kMaxAttendRows];
    float* out[kMaxAttendRows];
    ItemRows(const AttendArgs& a, const StepState& s, const AttendItem& item, int window) {
        const Segment& segment = s.batch.segments[item.segment];
        const int group = a.heads / a.page.kv_heads, hd = a.page.head_dim;
        for (int i = 0; i < item.count; ++i) {
            const int stacked = item.first + i, token = stacked / group;
            const int row = segment.row + token, head = item.kv_head * group + stacked % group;
            const int position = segment.position + token;
            rows[i] = {a.q + (size_t(row) * a.heads + head) * hd, first_visible(position, window), position + 1};
            out[i] = a.out + row * a.out_width + size_t(head) * hd;
        }
    }
};

void attend_one_cut(const AttendArgs& a, const StepState& s, const AttendItem& item, const VisibleRow* rows, int cut, ThreadScratch& scratch, CutResult& result) {
    const Segment& segment = s.batch.segments[item.segment];
    int lo = rows[0].lo, hi = rows[0].hi;
    for (int i = 1; i < item.count; ++i) { lo = std::min(lo, rows[i].lo); hi = std::max(hi, rows[i].hi); }
    const int first = std::max(lo, cut * kCut) / kFrame, last = (std::min(hi, (cut + 1) * kCut) + kFrame - 1) / kFrame;
    const uint8_t* frames[kCut / kFrame];
    const int32_t* starts = s.batch.starts.data() + segment.extent;
    const int32_t* extents = s.batch.frames.data() + segment.extent;
    int e = int(std::upper_bound(starts, starts + segment.extents, first) - starts) - 1;
    const size_t bytes = a.page.frame_bytes();
    const uint8_t* base = a.layer + size_t(item.kv_head) * a.page.head_bytes();
    for (int f = first; f < last; ++f) {
        while (e + 1 < segment.extents && starts[e + 1] <= f) ++e;
        frames[f - cut * (kCut / kFrame)] = base + size_t(extents[e] + (f - starts[e])) * bytes;
    }
    a.k.attend_cut(rows, item.count, frames, cut, a.page.head_dim, *scratch.attend, result);
}

struct AttendPhase final : Phase {
    AttendArgs a;
    explicit AttendPhase(const AttendArgs& a) : a(a) {}
    int items(const StepState& s) const override { return int(s.plans[a.plan].items.size()); }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const AttendPlan& plan = s.plans[a.plan];
        const int hd = a.page.head_dim;
        for (int i = begin; i < end; ++i) {
            const AttendItem& item = plan.items[i];
            const ItemRows at(a, s, item, plan.window);
            CutResult cut;
            if (item.cut >= 0) {
                cut.o = a.partials.o + size_t(item.partial) * kMaxAttendRows * hd;
                attend_one_cut(a, s, item, at.rows, item.cut, scratch, cut);
                float* m = a.partials.m + size_t(item.partial) * 2 * kMaxAttendRows;
                std::copy_n(cut.m, item.count, m);
                std::copy_n(cut.l, item.count, m + kMaxAttendRows);
                continue;
            }
            cut.o = scratch.o.as<float>();
            CutResult total;
            total.o = scratch.total.as<float>();
            std::fill_n(total.l, kMaxAttendRows, 0.0f);
            int lo = at.rows[0].lo, hi = at.rows[0].hi;
            for (int r = 1; r < item.count; ++r) { lo = std::min(lo, at.rows[r].lo); hi = std::max(hi, at.rows[r].hi); }
            for (int c = lo / kCut; c <= (hi - 1) / kCut; ++c) {
                attend_one_cut(a, s, item, at.rows, c, scratch, cut);
                a.k.merge_cut(total, cut, item.count, hd);
            }
            for (int r = 0; r < item.count; ++r) a.k.finish(total, r, hd, at.out[r]);
        }
    }
};

struct MergePhase final : Phase {
    AttendArgs a;
    explicit MergePhase(const AttendArgs& a) : a(a) {}
    int items(const StepState& s) const override { return int(s.plans[a.plan].merges.size()); }
    void run(const StepState& s, int begin, int end, ThreadScratch& scratch) override {
        const AttendPlan& plan = s.plans[a.plan];
        const int hd = a.page.head_dim;
        for (int i = begin; i < end; ++i) {
            const AttendItem& item = plan.merges[i];
            const ItemRows at(a, s, item, plan.window);
            CutResult total, cut;
            total.o = scratch.total.as<float>();
            std::fill_n(total.l, kMaxAttendRows, 0.0f);
            for (int c = 0; c < item.cut; ++c) {
                const size_t partial = item.partial + c;
                const float* m = a.partials.m + partial * 2 * kMaxAttendRows;
                std::copy_n(m, item.count, cut.m);
                std::copy_n(m + kMaxAttendRows, item.count, cut.l);
                cut.o = a.partials.o + partial * kMaxAttendRows * hd;
                a.k.merge_cut(total, cut, item.count, hd);
            }
            for (int r = 0; r < item.count; ++r) a.k.finish(total, r, hd, at.out[r]);
        }
    }
};

struct AddNormPhase final : Phase {
    const Kernels& k;
    float *x, *y;
    int width;
    bool output_rows;
    std::vector<float> weight;
    float eps;
    AddNormPhase(const Kernels& k, float* x, float* y, int width, bool output_rows, std::vector<float> w, float eps)
        : k(k), x(x), y(y), width(width), output_rows(output_rows), weight(std::move(w)), eps(eps) {}
    int items(const StepState& s) const override { return output_rows ? s.outputs : s.rows; }
    void run(const StepState&, int begin, int end, ThreadScratch&) override {
        for (int row = begin; row < end; ++row) {
            float* from = y + size_t(row) * width;
            k.rms_norm(from, weight.data(), eps, width, from);
            k.add(x + size_t(row) * width, from, width);
        }
    }
};

struct SelectPhase final : Phase {
    const float* x;
    float* out;
    int width;
    SelectPhase(const float* x, float* out, int width) : x(x), out(out), width(width) {}
    int items(const StepState& s) const override { return s.outputs; }
    void run(const StepState& s, int begin, int end, ThreadScratch&) override {
        for (int i = begin; i < end; ++i) std::copy_n(x + size_t(s.batch.outputs[i]) * width, width, out + size_t(i) * width);
    }
};

}  // namespace

Tape::Tape(std::shared_ptr<Pool> pool, const Kernels& kernels, const TapeShape& shape)
    : pool_(std::move(pool)), kernels_(kernels), shape_(shape) {
    const PageFormat& page = shape.page;
    if (page.head_dim % 16 || page.head_dim > 512 || page.head_dim < 16) refuse("head_dim is " + std::to_string(page.head_dim) + ", but must be a multiple of 16 up to 512");
    if (page.kv_heads < 1 || shape.heads % page.kv_heads) refuse("heads must be a multiple of kv_heads");
    kv_ = Memory(page.layer_bytes(shape.frames) * page.layers);
    q_ = Memory(size_t(shape.max_rows) * shape.heads * page.head_dim * 2);
    const size_t rows = std::max(shape.max_rows, shape.max_outputs), cols = shape.max_cols;
    dense_ = Memory(rows * cols * sizeof(float));
    size_t area = 0;
    auto reserve = [&]<class T>(T*& to, size_t elements) {
        quant_memory_[area] = Memory(elements * sizeof(T));
        to = quant_memory_[area++].as<T>();
    };
    const size_t blocks = rows * (cols / 32);
    quant_.cols = int(cols);
    reserve(quant_.q, rows * cols);
    reserve(quant_.d, blocks);
    reserve(quant_.s, blocks);
    reserve(quant_.neg16, 2 * blocks);
    reserve(quant_.neg32, blocks);
    reserve(quant_.wide, rows);
    reserve(quant_.wide_block, blocks);
    reserve(quant_.wide_q, rows * cols);
    reserve(quant_.wide_d, blocks);
    reserve(quant_.wide_neg16, 2 * blocks);
    reserve(quant_.wide_neg32, blocks);
    scratch_.resize(pool_->threads());
    for (auto& s : scratch_) {
        s.attend = std::make_unique<AttendScratch>();
        s.unpacked = Memory(scratch_bytes(shape.max_cols));
        s.o = Memory(sizeof(float) * kMaxAttendRows * page.head_dim);
        s.total = Memory(sizeof(float) * kMaxAttendRows * page.head_dim);
    }
}

int Tape::add_buffer(int width, bool output_rows) {
    const size_t rows = output_rows ? shape_.max_outputs : shape_.max_rows;
    buffers_.push_back({Memory(rows * width * sizeof(float)), width, output_rows});
    return int(buffers_.size()) - 1;
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
    push<EmbedPhase>(std::move(w), at(out), scale);
}

void Tape::linear(int x, std::vector<std::shared_ptr<Weight>> weights, int out, Prologue prologue, std::vector<float> bias, bool accumulate) {
    const int cols = prologue.kind == Prologue::Gate ? buffers_[x].width / 2 : buffers_[x].width;
    int outputs = 0;
    bool quantize = false;
    for (const auto& w : weights) {
        if (w->cols != cols) refuse("a weight takes " + std::to_string(w->cols) + " inputs, its input has " + std::to_string(cols));
        outputs += w->rows;
        quantize |= !traits(w->form).dense();
    }
    if (outputs != buffers_[out].width) refuse("weights give " + std::to_string(outputs) + " outputs, the buffer holds " + std::to_string(buffers_[out].width));
    if (!bias.empty() && int(bias.size()) != outputs) refuse("bias has the wrong length");
    if (prologue.kind == Prologue::Norm && int(prologue.weight.size()) != cols) refuse("norm weight has the wrong length");
    const bool output_rows = buffers_[x].output_rows;
    if (output_rows != buffers_[out].output_rows) refuse("input and output differ in rows");
    if (cols > shape_.max_cols) refuse("a linear op takes " + std::to_string(cols) + " inputs, the tape was made for " + std::to_string(shape_.max_cols));
    const float* input = prologue.kind == Prologue::None ? at(x) : dense_.as<float>();
    if (quantize || prologue.kind != Prologue::None)
        push<InputPhase>(kernels_, at(x), buffers_[x].width, cols, output_rows, quantize, std::move(prologue), dense_.as<float>(), &quant_);
    push<LinearPhase>(kernels_, std::move(weights), input, size_t(cols), &quant_, std::move(bias), Out{at(out), size_t(buffers_[out].width), nullptr, accumulate}, output_rows);
}

void Tape::rotate_store(int qkv, int layer, int rope, float scale, bool interleaved, std::vector<float> q_norm, std::vector<float> k_norm, float eps) {
    const PageFormat& page = shape_.page;
    if (buffers_[qkv].width != (shape_.heads + 2 * page.kv_heads) * page.head_dim) refuse("qkv has the wrong width");
    RotateArgs a{};
    a.eps = eps;
    a.scale = scale;
    a.heads = shape_.heads;
    a.kv_heads = page.kv_heads;
    a.head_dim = page.head_dim;
    a.interleaved = interleaved;
    Rope& r = *ropes_.at(rope);
    push<RotatePhase>(kernels_, a, std::move(q_norm), std::move(k_norm), at(qkv), size_t(buffers_[qkv].width), r.cos.as<float>(), r.sin.as<float>(),
                      q_.as<uint16_t>(), kv_.data() + page.layer_bytes(shape_.frames) * layer, page);
}

int Tape::plan_for(int window) {
    for (size_t i = 0; i < state_.plans.size(); ++i)
        if (state_.plans[i].window == window) return int(i);
    state_.plans.push_back({window, {}, {}});
    return int(state_.plans.size()) - 1;
}

void Tape::attention(int layer, int out, int window) {
    const PageFormat& page = shape_.page;
    if (buffers_.at(out).width != shape_.heads * page.head_dim) refuse("attention output has the wrong width");
    const AttendArgs a{kernels_, kv_.data() + page.layer_bytes(shape_.frames) * layer, page, shape_.heads, plan_for(window),
                       q_.as<uint16_t>(), at(out), size_t(buffers_[out].width), partials_};
    push<AttendPhase>(a);
    push<MergePhase>(a);
}

void Tape::add_norm(int x, int y, std::vector<float> weight, float eps) {
    if (buffers_.at(x).width != buffers_.at(y).width || int(weight.size()) != buffers_[x].width) refuse("add_norm has unequal widths");
    push<AddNormPhase>(kernels_, at(x), at(y), buffers_[x].width, buffers_[x].output_rows, std::move(weight), eps);
}

void Tape::select(int x, int out) {
    select_phase_ = phases_.size();
    push<SelectPhase>(at(x), at(out), buffers_.at(x).width);
}

// Rows of a segment that share a kv head are stacked (token-major) and cut into blocks. A decoding row with several cuts is an item per
// cut, so that a long context is spread over the threads; a block of a longer run goes through its cuts itself.
void Tape::plan_attention(AttendPlan& plan, int& partials) {
    plan.items.clear();
    plan.merges.clear();
    const int group = shape_.heads / shape_.page.kv_heads;
    const auto segments = state_.batch.segments;
    for (int i = 0; i < int(segments.size()); ++i) {
        const Segment& s = segments[i];
        const int stacked = s.rows * group;
        const int first_cut = first_visible(s.position, plan.window) / kCut;
        const int cuts = s.position / kCut - first_cut + 1;
        for (int head = 0; head < shape_.page.kv_heads; ++head)
            for (int at = 0; at < stacked; at += kernels_.attend_rows) {
                const int count = std::min(kernels_.attend_rows, stacked - at);
                if (s.rows > 1 || cuts == 1) {
                    plan.items.push_back({i, at, count, head, -1, 0});
                    continue;
                }
                plan.merges.push_back({i, at, count, head, cuts, partials});
                for (int c = 0; c < cuts; ++c) plan.items.push_back({i, at, count, head, first_cut + c, partials++});
            }
    }
}

void Tape::prepare(const Batch& batch) {
    const int rows = int(batch.tokens.size());
    if (rows > shape_.max_rows) refuse("step has " + std::to_string(rows) + " rows, the tape holds " + std::to_string(shape_.max_rows));
    if (batch.frames.size() != batch.starts.size()) refuse("extents differ in length");
    for (int32_t t : batch.tokens)
        if (t < 0 || t >= vocabulary_) refuse("token " + std::to_string(t) + " is outside the vocabulary of " + std::to_string(vocabulary_));
    choose_outputs(batch.outputs, rows);
    state_.batch = batch;
    state_.position.resize(rows);
    state_.frame.resize(rows);
    int row = 0;
    for (const Segment& s : batch.segments) {
        if (s.row != row || s.rows < 1 || s.rows > rows - row || s.position < 0) refuse("segments must cover the rows in order");
        if (s.position > kMaxPosition - s.rows) refuse("positions end at " + std::to_string(kMaxPosition));
        if (s.extents < 1 || s.extent < 0 || size_t(s.extent) + s.extents > batch.frames.size()) refuse("a segment has no pages");
        const int32_t* starts = batch.starts.data() + s.extent;
        const int32_t* frames = batch.frames.data() + s.extent;
        for (const AttendPlan& plan : state_.plans)
            if (first_visible(s.position, plan.window) / kFrame < starts[0]) refuse("a segment's pages begin after what its rows see");
        int e = 0;
        for (int i = 0; i < s.rows; ++i, ++row) {
            const int number = (s.position + i) / kFrame;
            while (e + 1 < s.extents && starts[e + 1] <= number) ++e;
            const int64_t frame = int64_t(frames[e]) + number - starts[e];
            if (number < starts[e] || frame < 0 || frame >= shape_.frames) refuse("a position lies outside the pool");
            state_.position[row] = s.position + i;
            state_.frame[row] = int(frame);
        }
        for (int i = 0; i < s.extents; ++i) {
            const int64_t next = i + 1 < s.extents ? starts[i + 1] : (s.position + s.rows - 1) / kFrame + 1;
            const int64_t length = std::max<int64_t>(0, next - starts[i]);
            if (frames[i] < 0 || (i + 1 < s.extents && length == 0) || frames[i] + length > shape_.frames) refuse("extents are out of order or outside the pool");
        }
    }
    if (row != rows) refuse("segments must cover the rows in order");
    state_.rows = rows;
    int partials = 0;
    for (AttendPlan& plan : state_.plans) {
        int used = 0;
        plan_attention(plan, used);
        partials = std::max(partials, used);
    }
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

void Tape::execute(size_t first_phase) {
    counts_.resize(phases_.size());
    for (size_t i = first_phase; i < phases_.size(); ++i) {
        counts_[i] = phases_[i]->items(state_);
        claims_[i]->reset(counts_[i], pool_->threads());
    }
    Barrier& barrier = pool_->barrier();
    pool_->run([&](int thread) {
        for (size_t i = first_phase; i < phases_.size(); ++i) {
            if (counts_[i] == 0) continue;
            int begin, end;
            while (claims_[i]->next(begin, end)) phases_[i]->run(state_, begin, end, scratch_[thread]);
            barrier.wait();
        }
    });
    state_.batch = {};
}

void Tape::run(const Batch& batch) {
    state_.rows = 0;   // nothing to rerun if this step is refused
    prepare(batch);
    execute(0);
}

void Tape::rerun(std::span<const int32_t> outputs) {
    choose_outputs(outputs, state_.rows);
    execute(select_phase_);
}

}  // namespace mill
