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

template <bool kSigned>
HDET_WIDEST void encode_block(const float* __restrict values, float inverse, const uint16_t* __restrict noise,
                              int count, uint8_t* __restrict codes) {
  for (int i = 0; i < count; ++i) {
    const float z = (static_cast<float>(static_cast<int>(noise[i])) - 32767.5f) * 0x1p-16f;
    codes[i] = encoded<kSigned>(values[i], inverse, z);
  }
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

// Moves the random bits of each quad of neighbours to where the codes have them: see position_of_bits.
HDET_WIDEST inline void rotate_quads(const uint64_t* __restrict from, int count, uint64_t* __restrict to) {
  for (int i = 0; i < count; ++i) to[i] = from[i] >> 16 | from[i] << 48;
}

// Encodes what load_codes decodes, rounding stochastically.
inline void store_codes(const float* values, void* stored, float* scales, bool is_signed, int64_t at, int64_t count,
                        const Noise& noise) {
  constexpr int kQuads = kStateBlock / 4 + 1;
  uint32_t words[2 * kQuads] = {};
  uint64_t drawn[kQuads], rotated[kQuads];
  uint16_t halves[4 * kQuads];  // the low half of a word comes first
  static_assert(sizeof(words) == sizeof(drawn) && sizeof(rotated) == sizeof(halves));
  auto* codes = static_cast<uint8_t*>(stored) + at;
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int here = static_cast<int>(std::min(kStateBlock, count - done));
    const int64_t skipped = (at + done) & 3;
    const int quads = static_cast<int>(skipped + here + 3) / 4;
    random_words(noise, kParamStream, static_cast<uint64_t>(at + done) >> 2, quads, words);
    std::memcpy(drawn, words, sizeof(words));
    rotate_quads(drawn, kQuads, rotated);
    std::memcpy(halves, rotated, sizeof(rotated));
    const uint32_t largest = largest_bits(values + done, here);
    const float scale = is_signed ? scale_of<true>(largest) : scale_of<false>(largest);
    const float inverse = is_signed ? inverse_of<true>(scale) : inverse_of<false>(scale);
    const auto encode = is_signed ? encode_block<true> : encode_block<false>;
    encode(values + done, inverse, halves + skipped, here, codes + done);
    scales[done / kStateBlock] = scale;
  }
}

}  // namespace hdet
