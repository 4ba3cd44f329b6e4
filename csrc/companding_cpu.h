// Conversion of blocks of state between codes of 8 bits and floats, on the CPU. The loops have no branches, so that the
// compiler vectorises them.
#pragma once

#include <algorithm>
#include <cstring>

#include "companding.h"
#include "convert_cpu.h"

namespace hdet {

template <bool kSigned>
HDET_WIDEST void decode_block(const uint8_t* __restrict codes, float scale, int count, float* __restrict out) {
  for (int i = 0; i < count; ++i) out[i] = decoded<kSigned>(codes[i], scale);
}

HDET_WIDEST inline uint32_t largest_bits(const float* __restrict values, int count) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(values[i]));
  return largest;
}

// 16 random bits plus ½, over 2¹⁶, less ½.
inline float centred(uint16_t bits) { return (static_cast<float>(static_cast<int>(bits)) - 32767.5f) * 0x1p-16f; }

template <bool kSigned>
HDET_WIDEST void encode_block(const float* __restrict values, float inverse, const uint16_t* __restrict noise,
                              int count, uint8_t* __restrict codes) {
  for (int i = 0; i < count; ++i) codes[i] = encoded<kSigned>(values[i], inverse, centred(noise[i]));
}

// Decodes elements at .. at + count of a state, the first of which begins the block with scale scales[0].
inline void load_codes(const void* stored, const float* scales, bool is_signed, int64_t at, int64_t count, float* out) {
  const auto* codes = static_cast<const uint8_t*>(stored) + at;
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int here = static_cast<int>(std::min(kStateBlock, count - done));
    const auto decode = is_signed ? decode_block<true> : decode_block<false>;
    decode(codes + done, scales[done / kStateBlock], here, out + done);
  }
}

// The random bits of the codes of at most kBlock elements, which all states share; see position_of_bits.
class CodeBits {
 public:
  // Draws those of the elements at .. at + count of the flat buffers.
  void draw(const Noise& noise, int64_t at, int64_t count) {
    first_ = at & 3;
    const int quads = static_cast<int>(first_ + count + 3) / 4;
    uint32_t words[2 * kQuads];
    random_words(noise, kParamStream, static_cast<uint64_t>(at) >> 2, quads, words);
    uint64_t drawn[kQuads], rotated[kQuads];
    static_assert(sizeof(words) == sizeof(drawn) && sizeof(rotated) == sizeof(halves_));
    std::memcpy(drawn, words, quads * sizeof(*drawn));
    rotate_quads(drawn, quads, rotated);
    std::memcpy(halves_, rotated, quads * sizeof(*rotated));
  }

  const uint16_t* data() const { return halves_ + first_; }

 private:
  static constexpr int kQuads = kBlock / 4 + 1;

  HDET_WIDEST static void rotate_quads(const uint64_t* __restrict from, int count, uint64_t* __restrict to) {
    for (int i = 0; i < count; ++i) to[i] = from[i] >> 16 | from[i] << 48;
  }

  int64_t first_;
  uint16_t halves_[4 * kQuads];  // the low half of a word comes first
};

// Encodes what load_codes decodes, rounding stochastically by `bits`, which begin at element `at`.
inline void store_codes(const float* values, void* stored, float* scales, bool is_signed, int64_t at, int64_t count,
                        const uint16_t* bits) {
  auto* codes = static_cast<uint8_t*>(stored) + at;
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int here = static_cast<int>(std::min(kStateBlock, count - done));
    const uint32_t largest = largest_bits(values + done, here);
    const float scale = is_signed ? scale_of<true>(largest) : scale_of<false>(largest);
    const float inverse = is_signed ? inverse_of<true>(scale) : inverse_of<false>(scale);
    const auto encode = is_signed ? encode_block<true> : encode_block<false>;
    encode(values + done, inverse, bits + done, here, codes + done);
    scales[done / kStateBlock] = scale;
  }
}

}  // namespace hdet
