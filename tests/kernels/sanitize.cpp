// Packs every weight type and runs tapes over odd shapes, random bytes and refused batches. test_sanitizers.py builds it with a sanitizer, or
// with COUNT_ALLOCATIONS, and judges it by its exit; it also fails by itself if one thread and several give different bits.
#include "tape.h"
#include "variants.h"

#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>

// The build renames mmap and munmap to these: blocks of the heap end where their bytes end, so that a step past the end is seen.
extern "C" void* guarded_mmap(void*, size_t bytes, int, int, int, off_t) noexcept {
    void* p = nullptr;
    if (posix_memalign(&p, 4096, bytes)) return MAP_FAILED;
    return std::memset(p, 0, bytes);
}
extern "C" int guarded_munmap(void* p, size_t) noexcept { free(p); return 0; }

#ifdef COUNT_ALLOCATIONS
std::atomic<long> allocations{0};
void* operator new(size_t bytes) {
    ++allocations;
    if (void* p = std::malloc(bytes)) return p;
    throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
#else
constexpr long allocations = 0;
#endif

using namespace mill;

namespace {

constexpr int kSequences = 3, kLength = 720, kPages = kLength / kFrame, kVocabulary = 37;
constexpr int kFrames = 2 * kSequences * kPages;   // of two KV groups
constexpr int kRows = 73;   // of the largest step below, so that it ends where memory ends

void require(bool ok, const std::string& what) {
    if (ok) return;
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

template <class Error = std::invalid_argument, class Body> bool refuses(Body body) {
    try {
        body();
    } catch (const Error&) {
        return true;
    }
    return false;
}

// What the random bytes of a weight are: any bits at all, or any integers under scales of usual size.
enum class Bytes { Any, Usual };

std::vector<uint8_t> weight_bytes(Form form, int rows, int cols, Bytes bytes, std::mt19937& random) {
    const FormTraits& t = traits(form);
    std::vector<uint8_t> data(size_t(rows) * cols / t.group * t.file_bytes);
    for (auto& b : data) b = uint8_t(random());
    if (bytes == Bytes::Any) return data;
    for (size_t at = 0; at < data.size(); at += t.file_bytes) {
        auto scale = [&](int offset) { data[at + offset + 1] = uint8_t((data[at + offset + 1] & 0x83) | 0x10); };
        if (form == Form::F32) data[at + 3] = 0x3c, data[at + 2] &= 0x7f;
        else if (form == Form::BF16) data[at + 1] = 0x3c;
        else scale(form == Form::Q6K ? 208 : 0);
        if (form == Form::Q4M || form == Form::Q5M || form == Form::Q4K || form == Form::Q5K) scale(2);
    }
    return data;
}

// A little model of one weight type: two layers, the second with a window.
class Model {
public:
    Model(std::shared_ptr<Pool> pool, const Kernels& kernels, Form form, Bytes bytes, int window, int seed)
        : form_(form), bytes_(bytes), random_(seed), pool_(pool) {
        const int group = traits(form).group;
        const int hidden = group == 1 ? 40 : group == 32 ? 96 : 512, inner = group == 1 ? 24 : group;
        const int dim = group == 1 ? 48 : group == 32 ? 80 : 16, heads = group == 1 ? 3 : group == 32 ? 4 : 16, kv_heads = group == 1 ? 1 : 2;
        const int widest = std::max({hidden, inner, heads * dim});
        const KVType types[][2] = {{KVType::Bf16, KVType::Bf16}, {KVType::Int8, KVType::Int4}, {KVType::Int4, KVType::Int8}, {KVType::Int4, KVType::Int4}};
        const auto& [key, value] = types[seed % 4];
        TapeShape shape{kRows, 5, widest, kFrames, 2, heads, kv_heads, {dim, key, value, std::min(dim, 32)}, {{{}, {0, 0}}, {{}, {32, 24}}}};
        for (int layer = 0; layer < 2; ++layer)
            for (int head = 0; head < kv_heads; ++head) shape.groups[layer].pairs.push_back({layer, head});
        weights_.resize(size_t(2) * kv_heads * kPages);
        tape_ = std::make_unique<Tape>(pool, kernels, shape);
        Tape& t = *tape_;
        const int x = t.add_buffer(hidden, false, false), y = t.add_buffer(hidden, false, false), qkv = t.add_buffer((heads + 2 * kv_heads) * dim, false, false);
        const int attended = t.add_buffer(heads * dim, false, false), gated = t.add_buffer(inner, false, false), last = t.add_buffer(hidden, true, false);
        logits_ = t.add_buffer(kVocabulary, true, true);
        const int rope = t.add_rope(std::vector<double>(dim / 2, 0.37));
        t.embed(matrix(kVocabulary, hidden), x, 2.0f);
        for (int layer = 0; layer < 2; ++layer) {
            const bool norms = layer == 1;
            t.linear(x, {matrix(heads * dim, hidden), matrix(kv_heads * dim, hidden), matrix(kv_heads * dim, hidden)}, qkv, norm(hidden),
                     ones((heads + 2 * kv_heads) * dim), Out::Store, {});
            t.rotate_store(qkv, layer, rope, 0.2f, layer == 0, norms ? ones(dim) : std::vector<float>{}, norms ? ones(dim) : std::vector<float>{}, 1e-6f);
            t.attention(layer, attended, layer * window);
            if (layer == 0) {
                t.linear(attended, {matrix(hidden, heads * dim)}, x, {}, {}, Out::Add, {});
            } else {
                t.linear(attended, {matrix(hidden, heads * dim)}, y, {}, {}, Out::Store, {});
                t.add_norm(x, y, ones(hidden), 1e-6f);
            }
            t.linear(x, {matrix(inner, hidden), matrix(inner, hidden)}, gated, norm(hidden), {}, Out::Gate, layer ? Activation::GeluTanh : Activation::Silu);
            t.linear(gated, {matrix(hidden, inner)}, x, {}, {}, Out::Add, {});
        }
        t.select(x, last);
        t.linear(last, {matrix(kVocabulary, hidden)}, logits_, norm(hidden), {}, Out::Store, {});
    }

    struct Part { int rows, position; };
    long allocated = 0;   // blocks of the heap that runs of the tape took

    // A step from start to finish, and the logits that it gives.
    template <class... Shifts> std::vector<float> step(const std::vector<Part>& parts, Shifts... shifts) {
        start(parts, shifts...);
        return finish(parts.size());
    }

    // Part i belongs to sequence i. The pages of a sequence are single frames in descending order; those of the second layer have holes before the
    // step's rows. The batch is gone when this returns.
    void start(const std::vector<Part>& parts, int row_shift = 0, int token = 0, int frame_shift = 0, int first_start = 0) {
        std::vector<int32_t> tokens, frames, starts, outputs;
        std::vector<Segment> segments;
        std::vector<PageTable> tables;
        for (int i = 0; i < int(parts.size()); ++i) {
            segments.push_back({int(tokens.size()) + row_shift, parts[i].rows, parts[i].position, 2, i % 2, i == 0 ? 0 : -1});
            for (int r = 0; r < parts[i].rows; ++r) tokens.push_back((token ? token : 5 * r + i) % (token ? INT32_MAX : kVocabulary));
            outputs.push_back(int(tokens.size()) - 1);
            for (int layer = 0; layer < 2; ++layer) {
                tables.push_back({int(frames.size()), kPages});
                for (int p = 0; p < kPages; ++p) {
                    const bool hole = layer && p % 5 == 1 && p < parts[i].position / kFrame;
                    frames.push_back(hole ? -1 : (layer * kSequences + i + 1) * kPages - 1 - p + frame_shift);
                    starts.push_back(first_start + p);
                }
            }
        }
        const FrameWeights weights{weights_.data(), kPages, nullptr};
        const long before = allocations;
        tape_->start({tokens, segments, tables, frames, starts, outputs, {&weights, 1}});
        allocated += allocations - before;
    }

    std::vector<float> finish(size_t outputs) {
        const long before = allocations;
        tape_->finish();
        allocated += allocations - before;
        std::vector<float> logits;
        for (size_t i = 0; i < outputs; ++i) {
            const float* from = tape_->buffer(logits_) + i * tape_->stride(logits_);
            logits.insert(logits.end(), from, from + kVocabulary);
        }
        return logits;
    }

    void rerun() {
        const std::vector<int32_t> outputs{0};
        tape_->rerun(outputs);
    }

private:
    std::shared_ptr<Weight> matrix(int rows, int cols) {
        const auto data = weight_bytes(form_, rows, cols, bytes_, random_);
        return std::make_shared<Weight>(pack_weight(form_, rows, cols, data.data(), data.size(), *pool_));
    }
    static std::vector<float> ones(int n) { return std::vector<float>(n, 1.0f); }
    static Tape::Norm norm(int n) { return {ones(n), 1e-5f}; }

    Form form_;
    Bytes bytes_;
    std::mt19937 random_;
    std::shared_ptr<Pool> pool_;
    std::vector<int64_t> weights_;   // outlives the tape, which may end in flight
    std::unique_ptr<Tape> tape_;
    int logits_ = 0;
};

void pack_odd_shapes(Form form, Pool& pool, std::mt19937& random) {
    const int group = traits(form).group;
    for (int rows : {1, 15, 16, 17, 50})
        for (int groups : {1, 3, 7}) {
            const int cols = groups * group;
            const auto data = weight_bytes(form, rows, cols, Bytes::Any, random);
            const Weight w = pack_weight(form, rows, cols, data.data(), data.size(), pool);
            std::vector<float> row(cols);
            for (int r = 0; r < rows; ++r) dequantize_row(w, r, row.data());
            require(refuses([&] { pack_weight(form, rows, cols, data.data(), data.size() - 1, pool); }), "bytes of another shape were packed");
        }
}

std::vector<std::vector<float>> run_steps(Model& model) {
    std::vector<std::vector<float>> results;
    for (const auto& parts : std::vector<std::vector<Model::Part>>{
             {{1, 0}}, {{2, 0}}, {{3, 508}}, {{1, 700}, {1, 512}, {2, 511}}, {{33, 490}}, {{5, 509}, {1, 0}, {67, 40}}, {{1, kLength - 1}, {4, 20}}})
        results.push_back(model.step(parts));
    return results;
}

void refuse_bad_batches(Model& model) {
    const auto before = model.step({{3, 40}});
    const int huge = INT32_MAX;
    auto bad = [&](const char* what, auto body) { require(refuses(body), std::string("not refused: ") + what); };
    bad("too many rows", [&] { model.step({{kRows + 1, 0}}); });
    bad("too many outputs", [&] { model.step(std::vector<Model::Part>(6, {1, 0})); });
    bad("a position past the pool", [&] { model.step({{2, 2 * kFrames * kFrame}}); });
    bad("a position near the end of the integers", [&] { model.step({{2, huge}}); });
    bad("a negative position", [&] { model.step({{2, -1}}); });
    bad("rows that do not follow each other", [&] { model.step({{2, 0}}, 1); });
    bad("a token past the vocabulary", [&] { model.step({{2, 0}}, 0, kVocabulary); });
    bad("a frame past the pool", [&] { model.step({{2, 0}}, 0, 0, kFrames); });
    bad("a frame before the pool", [&] { model.step({{2, 0}}, 0, 0, -kFrames); });
    bad("frames near the end of the integers", [&] { model.step({{2, 0}}, 0, 0, huge - kFrames); });
    bad("pages that begin after the row", [&] { model.step({{2, 0}}, 0, 0, 0, 3); });
    bad("pages that begin after what the row sees", [&] { model.step({{2, 40}}, 0, 0, 0, 3); });
    bad("pages that begin before the sequence", [&] { model.step({{2, 40}}, 0, 0, 0, -huge); });
    require(model.step({{3, 40}}) == before, "a refused batch changed the tape");
}

// Between start and finish the pool has nothing else to give; what is asked of it is refused and disturbs nothing.
void misuse_a_step_in_flight(Model& model, Model& other, Pool& pool) {
    const auto want = model.step({{3, 40}});
    auto bad = [&](const char* what, auto body) { require(refuses<std::logic_error>(body), std::string("not refused: ") + what); };
    bad("a finish of nothing", [&] { model.finish(1); });
    bad("a finish of nothing in the pool", [&] { pool.finish(); });
    model.start({{3, 40}});
    bad("a second start", [&] { model.start({{1, 0}}); });
    bad("a rerun in flight", [&] { model.rerun(); });
    bad("another tape's start", [&] { other.start({{1, 0}}); });
    bad("another tape's finish", [&] { other.finish(1); });
    for (int items : {0, 1, 9}) bad("a job of the pool", [&] { pool.parallel(items, [](int, int) {}); });
    require(model.finish(1) == want, "misuse disturbed the step in flight");
    model.rerun();
}

// Whichever thread fails, finish says so, and the pool goes on.
void fail_in_every_thread(Pool& pool) {
    for (int failing = 0; failing <= pool.threads(); ++failing) {
        std::atomic<bool> failed{false};
        const std::function<void(int)> body = [&](int thread) {
            if (thread == failing || failing == pool.threads()) {
                failed = true;
                throw std::runtime_error("a body failed");
            }
            while (!failed) std::this_thread::yield();   // the job is not over before that thread has come
        };
        pool.start(body);
        require(refuses<std::runtime_error>([&] { pool.finish(); }), "an error was lost");
        std::atomic<int> count{0};
        pool.parallel(100, [&](int begin, int end) { count += end - begin; });
        require(count == 100, "a pool in which a body failed does not work any more");
    }
}

}  // namespace

int main() {
    std::mt19937 random(1);
    for (const Kernels* kernels : usable_kernels()) {
        const auto one = std::make_shared<Pool>(1), three = std::make_shared<Pool>(3);
        for (Pool* pool : {one.get(), three.get()}) fail_in_every_thread(*pool);
        for (int f = 0; f < int(std::size(kForms)); ++f) {
            const Form form = Form(f);
            pack_odd_shapes(form, *three, random);
            const int window = f % 2 ? 5 : 520;
            Model hostile(three, *kernels, form, Bytes::Any, window, f);
            run_steps(hostile);
            Model alone(one, *kernels, form, Bytes::Usual, window, f), alone_too(one, *kernels, form, Bytes::Usual, window, f), together(three, *kernels, form, Bytes::Usual, window, f);
            const auto want = run_steps(alone);
            const std::string where = std::string(kernels->name) + " " + traits(form).name;
            for (const auto& logits : want)
                for (float x : logits) require(std::isfinite(x), where + ": a logit is not finite");
            require(run_steps(together) == want, where + ": three threads give other bits than one");
            together.allocated = 0;
            run_steps(together);
            require(together.allocated == 0, where + ": steps like earlier ones take memory from the heap");
            if (form != Form::Q8) continue;
            refuse_bad_batches(together);
            misuse_a_step_in_flight(together, hostile, *three);
            misuse_a_step_in_flight(alone, alone_too, *one);
            for (Model* model : {&together, &alone}) model->start({{67, 40}});   // and destroyed in flight
        }
    }
    std::puts("done");
}
