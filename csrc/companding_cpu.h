// Conversion of blocks of state between codes of 8 bits and floats, on the CPU. The loops have no branches, so that the
// compiler vectorises them.
#pragma once

#include <algorithm>

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

// Words of random bits for `count` pairs of neighbours from pair `first` on. Noise::word has the same bits; here the
// upper half of the number of a pair is told from the lower one, which keeps all arithmetic in 32 bits.
HDET_WIDEST inline void random_words(const Noise noise, uint32_t stream, uint64_t first, int count,
                                     uint32_t* __restrict words) {
  const auto low = static_cast<uint32_t>(first), high = static_cast<uint32_t>(first >> 32);
  for (int i = 0; i < count; ++i) {
    const uint32_t pair = low + static_cast<uint32_t>(i);
    words[i] = mix(mix(pair ^ noise.key) + (pair < low ? high + 1 : high) + stream * kGolden);
  }
}

template <bool kSigned>
HDET_WIDEST void encode_block(const float* __restrict values, float inverse, const uint16_t* __restrict noise,
                              int count, uint8_t* __restrict codes) {
  for (int i = 0; i < count; ++i)
    codes[i] = encoded<kSigned>(values[i], inverse, static_cast<float>(static_cast<int>(noise[i])) + 0.5f);
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

// Encodes what load_codes decodes, rounding stochastically.
inline void store_codes(const float* values, void* stored, float* scales, bool is_signed, int64_t at, int64_t count,
                        const Noise& noise, uint32_t stream) {
  uint32_t words[kStateBlock / 2 + 1];
  const auto* halves = reinterpret_cast<const uint16_t*>(words);  // the low half is for the even position
  auto* codes = static_cast<uint8_t*>(stored) + at;
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int here = static_cast<int>(std::min(kStateBlock, count - done));
    const int64_t odd = (at + done) & 1;
    random_words(noise, stream, static_cast<uint64_t>(at + done) >> 1, static_cast<int>(odd + here + 1) / 2, words);
    const float scale = scale_of(largest_bits(values + done, here));
    const auto encode = is_signed ? encode_block<true> : encode_block<false>;
    encode(values + done, inverse_of(scale), halves + odd, here, codes + done);
    scales[done / kStateBlock] = scale;
  }
}

}  // namespace hdet
