// Frames of a KV pool on their way from one pool to another: as one stream of bytes, whatever the frames' numbers and however large the pool.
//
// The stream goes group by group, and in a group for each of its slots, for each of its frames in the order given, through the bytes of that
// head's frame (page_format.h). Neighbours in the list that are neighbours in the pool are one run of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mill {

// Where slots and frames lie: frame f of slot s begins at s * slot_stride + f * piece_bytes.
struct FrameGrid {
    size_t slot_stride, piece_bytes, frames;
};

// Frames of one KV group, which has the first `slots` slots.
struct GroupFrames {
    size_t slots;
    std::span<const int32_t> numbers;
};

class FrameStream {
public:
    // pool_bytes: what the pool's memory has. Throws std::invalid_argument if a frame is not in the pool, or the grid not in its memory.
    FrameStream(const FrameGrid& grid, size_t pool_bytes, std::span<const GroupFrames> groups);

    size_t bytes() const { return bytes_; }

    // The bytes [begin, begin + count) of the stream. Throw std::out_of_range if it has fewer.
    void gather(const uint8_t* pool, size_t begin, size_t count, uint8_t* out) const;
    void scatter(uint8_t* pool, size_t begin, size_t count, const uint8_t* data) const;
    // From another pool's stream of the same length.
    void copy(uint8_t* pool, size_t begin, size_t count, const uint8_t* other_pool, const FrameStream& other) const;

private:
    struct Run { size_t at, end, offset; };   // bytes of a slot's part of the stream, and where they lie in the slot
    struct Group { size_t begin, end, slot_bytes; std::vector<Run> runs; };

    template <class Visit> void walk(size_t begin, size_t count, Visit visit) const;
    void require(size_t begin, size_t count) const;

    size_t slot_stride_, bytes_ = 0;
    std::vector<Group> groups_;
};

}  // namespace mill
