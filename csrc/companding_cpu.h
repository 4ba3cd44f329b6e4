// Conversion of blocks of state between codes of 8 bits and floats, on the CPU. The loops have no branches, so that the
// compiler vectorises them.
#pragma once

#include <algorithm>

#include "companding.h"
#include "convert_cpu.h"

namespace hdet {

template <bool kSigned>
HDET_WIDEST void decode_block(const uint8_t* __restrict codes, float scale, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = decoded<kSigned>(codes[i], scale);
}

HDET_WIDEST inline uint32_t largest_bits(const float* __restrict values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(values[i]));
  return largest;
}

template <bool kSigned>
HDET_WIDEST void encode_block(const float* __restrict values, float inverse, const Noise noise, uint32_t stream,
                              int64_t at, int64_t count, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = Noise::half(noise.word(stream, at + i), at + i);
    codes[i] = encoded<kSigned>(values[i], inverse, (static_cast<float>(static_cast<int>(bits)) + 0.5f) * 0x1p-16f);
  }
}

// Decodes elements at .. at + count of a state, the first of which begins the block with scale scales[0].
inline void load_codes(const void* stored, const float* scales, bool is_signed, int64_t at, int64_t count, float* out) {
  const auto* codes = static_cast<const uint8_t*>(stored) + at;
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int64_t here = std::min(kStateBlock, count - done);
    const auto decode = is_signed ? decode_block<true> : decode_block<false>;
    decode(codes + done, scales[done / kStateBlock], here, out + done);
  }
}

// Encodes what load_codes decodes, rounding stochastically.
inline void store_codes(const float* values, void* stored, float* scales, bool is_signed, int64_t at, int64_t count,
                        const Noise& noise, uint32_t stream) {
  auto* codes = static_cast<uint8_t*>(stored) + at;
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int64_t here = std::min(kStateBlock, count - done);
    const uint32_t largest = largest_bits(values + done, here);
    const float scale = is_signed ? scale_of<true>(largest) : scale_of<false>(largest);
    const auto encode = is_signed ? encode_block<true> : encode_block<false>;
    encode(values + done, is_signed ? inverse_of<true>(scale) : inverse_of<false>(scale), noise, stream, at + done, here, codes + done);
    scales[done / kStateBlock] = scale;
  }
}

}  // namespace hdet
