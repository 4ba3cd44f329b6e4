// Conversion of the two sums of squares of amsgrad between codes of 8 bits and floats, on the CPU. As in companding_cpu.h,
// the loops have no branches.
#pragma once

#include "amsgrad_codes.h"
#include "companding_cpu.h"

namespace hdet {

// The codes of both sums from one element on, and the scales of the blocks that it begins.
struct AmsgradCodes {
  uint8_t *current, *largest;
  float *current_scales, *largest_scales;
};

HDET_WIDEST inline void decode_block_of_largest(const uint8_t* __restrict codes, float scale, int count,
                                                float* __restrict out) {
  for (int i = 0; i < count; ++i) out[i] = decoded_largest(codes[i], scale);
}

HDET_WIDEST inline void decode_block_of_shares(const uint8_t* __restrict codes, const uint8_t* __restrict largest,
                                               float scale, int count, float* __restrict out) {
  for (int i = 0; i < count; ++i) out[i] = decoded_share(codes[i], decoded_largest(largest[i], scale));
}

HDET_WIDEST inline void encode_block_of_both(const float* __restrict current, const float* __restrict largest,
                                             uint32_t exponent, float scale, const uint16_t* __restrict noise, int count,
                                             uint8_t* __restrict shares, uint8_t* __restrict codes) {
  for (int i = 0; i < count; ++i) {
    const uint8_t code = encoded_largest(largest[i], exponent);
    codes[i] = code;
    shares[i] = encoded_share(current[i], decoded_largest(code, scale), centred(noise[i]));
  }
}

// Decodes the largest sums of count elements.
inline void load_largest(const AmsgradCodes& from, int64_t count, float* out) {
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int here = static_cast<int>(std::min(kStateBlock, count - done));
    decode_block_of_largest(from.largest + done, from.largest_scales[done / kStateBlock], here, out + done);
  }
}

// Decodes those current sums of count elements that are shares; load_codes decodes the others.
inline void load_shares(const AmsgradCodes& from, int64_t count, float* out) {
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int64_t block = done / kStateBlock;
    const int here = static_cast<int>(std::min(kStateBlock, count - done));
    if (from.current_scales[block] < 0)
      decode_block_of_shares(from.current + done, from.largest + done, from.largest_scales[block], here, out + done);
  }
}

// Encodes both sums of count elements, the current ones as shares, rounded stochastically by `bits`.
inline void store_amsgrad(const float* current, const float* largest, const AmsgradCodes& to, int64_t count,
                          const uint16_t* bits) {
  for (int64_t done = 0; done < count; done += kStateBlock) {
    const int64_t block = done / kStateBlock;
    const int here = static_cast<int>(std::min(kStateBlock, count - done));
    const uint32_t most = largest_bits(largest + done, here);
    const float scale = scale_of_largest(most);
    encode_block_of_both(current + done, largest + done, exponent_of_largest(most), scale, bits + done, here,
                         to.current + done, to.largest + done);
    to.current_scales[block] = -scale;
    to.largest_scales[block] = scale;
  }
}

}  // namespace hdet
