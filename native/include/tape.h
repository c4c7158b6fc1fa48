// A recorded forward pass: a flat list of phases over fixed buffers, replayed once per engine step with new rows.
#pragma once

#include "pool.h"
#include "step.h"

namespace mill {

struct ThreadScratch {
    std::unique_ptr<AttendScratch> attend;
    Memory columns, places, row, o, total;   // row: an embedding
    std::vector<uint8_t*> frames;            // of each kv head: a row's
    LinearScratch linear{};                  // over columns and places
};

struct LinearPhase;

class Phase {
public:
    virtual ~Phase() = default;
    virtual int items(const StepState& s) const = 0;
    virtual void run(const StepState& s, int begin, int end, ThreadScratch& scratch) = 0;
};

struct Activations;

// Where the kv heads of a layer lie.
struct LayerPlace {
    std::vector<int> groups;
    std::vector<uint8_t*> slots;
    std::vector<float> factor, zero;   // [kv_heads][head_dim], of integer keys
};

class Tape {
public:
    Tape(std::shared_ptr<Pool> pool, const Kernels& kernels, const TapeShape& shape);
    Tape(const Tape&) = delete;
    ~Tape();   // finishes what is in flight

    // Activations lie in tiles (kernels.h); plain ones row after row, for buffer().
    int add_buffer(int width, bool output_rows, bool plain);
    int add_rope(std::vector<double> inverse_frequencies);

    struct Norm { std::vector<float> weight; float eps = 0; };   // no weight: no norm

    void embed(std::shared_ptr<Weight> w, int out, float scale);
    // The weights' outputs side by side; with Out::Gate two weights, the first of which gives what is activated.
    void linear(int x, std::vector<std::shared_ptr<Weight>> weights, int out, Norm norm, std::vector<float> bias, Out::Kind kind, Activation activation);
    void rotate_store(int qkv, int layer, int rope, float scale, bool interleaved, std::vector<float> q_norm, std::vector<float> k_norm, float eps);
    void attention(int layer, int out, int window);
    // Of a layer's integer keys: what is taken off and divided by before they are rounded, [kv_heads][head_dim]. 0 and 1 if never set.
    void calibrate(int layer, std::vector<float> factor, std::vector<float> zero);
    void add_norm(int x, int y, std::vector<float> weight, float eps);
    void select(int x, int out);

    // Begins a step: the pool's other threads set to work, and the caller is free until finish(). Throws std::invalid_argument, before anything is
    // written, if the batch does not fit the tape, and std::logic_error while the pool is at work.
    void start(const Batch& batch);
    // Joins the step that start() began, and returns when it is executed. Throws std::logic_error if there is none.
    void finish();
    // Computes the logits of other rows of the step that was finished last.
    void rerun(std::span<const int32_t> outputs);

    // Keys of a sequence's positions before `count`: f32 [layers][kv_heads][count][head_dim].
    // Throws std::invalid_argument if one of them has no frame.
    void read_keys(std::span<const PageTable> tables, std::span<const int32_t> frames, std::span<const int32_t> starts, int count, float* out) const;

    // A plain buffer, how wide it is, and how far apart its rows are.
    const float* buffer(int index) const;
    int width(int index) const { return buffers_.at(index).width; }
    size_t stride(int index) const { return buffers_.at(index).stride(); }
    int pairs() const { return shape_.layers * shape_.kv_heads; }
    int head_dim() const { return shape_.page.head_dim; }
    uint8_t* kv() const { return kv_.data(); }
    size_t kv_bytes() const { return kv_.size(); }
    int kv_descriptor() const { return kv_.descriptor(); }   // -1 unless the pool is shared

private:
    struct Buffer {
        Memory memory;
        int width;
        bool output_rows, plain;
        // Plain rows are an odd number of cache lines apart, so that they don't all fall on the same set of a cache.
        size_t stride() const { const size_t lines = (size_t(width) + kLanes - 1) / kLanes; return (plain ? lines | 1 : lines) * kLanes; }
    };
    struct Rope { std::vector<double> inverse; Memory cos, sin; };

    Activations at(int index) const;
    void place_pairs();
    void launch(size_t first_phase);
    void walk(int thread) noexcept;
    template <class P, class... A> void push(A&&... args);

    std::shared_ptr<Pool> pool_;
    const Kernels& kernels_;
    TapeShape shape_;
    std::vector<Buffer> buffers_;
    std::vector<std::unique_ptr<Rope>> ropes_;
    std::vector<std::unique_ptr<Phase>> phases_;
    std::vector<std::unique_ptr<Claims>> claims_;
    std::vector<int> counts_;
    std::vector<ThreadScratch> scratch_;
    Step step_;
    size_t first_phase_ = 0;           // of the step in flight
    bool started_ = false;
    const std::function<void(int)> walk_ = [this](int thread) { walk(thread); };
    int inputs_ = 0;
    std::vector<LinearPhase*> before_attention_;   // linear ops since the last attention
    size_t select_phase_ = 0;   // the first: from there on only wanted rows are computed

    std::vector<LayerPlace> layers_;
    Memory kv_, q_, sums_;             // sums: maximum and sum of attention, f32 [rows][heads][2], of rows whose weights are wanted
    // Input of the linear op under way: normed, for dense weights, and quantised. Shared, since ops run one after another.
    Memory dense_, records_, used_, outlier_at_, outlier_x_;
    std::vector<int> slots_;
    QuantRows quant_{};
};

}  // namespace mill
