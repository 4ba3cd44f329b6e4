// Replicas that average with compression send their parameters as differences in few bits. Here are the formats of those
// numbers, the layout of a message (a wire: one encoded shard for each process), and the checked arguments of the
// operators.
// hdet_kernels/ops/wire.py has the equations; ops/torch/wire.py has the same formulas in torch.
#pragma once

#include <cfloat>
#include <optional>

#include "check.h"
#include "rounding.h"

namespace hdet {

// The order of FORMATS in hdet_kernels/ops/wire.py.
enum class Format : int64_t { bf16, int8 };

// BLOCK and GRAIN of hdet_kernels/ops/wire.py: the elements that share a scale, and the number that the elements of a
// shard are a multiple of, so that an encoded shard (a row of a wire) is a multiple of 16 bytes.
inline constexpr int kShared = 256;
inline constexpr int64_t kGrain = 4 * kShared;

// The bits of |value|. As whole numbers they are ordered like the floats, with every NaN above infinity.
HDET_BOTH int32_t magnitude(float value) { return bits_as<int32_t>(value) & 0x7fffffff; }

// A format stores a number as a code. The format object holds the numbers that a whole block shares: `fitting` computes
// them from the largest magnitude of the block. `value` decodes a code.
struct Bf16 {
  using Code = uint16_t;
  static constexpr bool kScaled = false;

  static HDET_BOTH Bf16 fitting(int32_t) { return {}; }
  HDET_BOTH Code code(float number) const { return bf16_bits(number); }
  HDET_BOTH float value(Code code) const { return float_of_bf16(code); }
};

struct Int8 {
  using Code = int8_t;
  static constexpr bool kScaled = true;
  static constexpr float kMost = 127;
  // Adding this to a small number rounds it to a whole one, ties to even. The lowest byte of the sum's bits is that
  // whole number.
  static constexpr float kWhole = 0x1.8p23f;
  static constexpr int32_t kInfinity = 0x7f800000;
  float scale;

  // Infinite where a number is not finite: the bits of a NaN depend on the processor.
  static HDET_BOTH Int8 fitting(int32_t largest) {
    return {bits_as<float>(largest < kInfinity ? largest : kInfinity) / kMost};
  }
  // A subnormal scale is coarse, so a quotient may exceed 127. If the scale is 0 (the block is zero, or too small for a
  // scale), the codes are 0. An infinite scale makes the whole block NaN, so that an overflow does not go unnoticed.
  HDET_BOTH Code code(float number) const {
    const bool usable = scale > 0 && scale <= FLT_MAX;
    float steps = number / (usable ? scale : 1.0f);
    steps = steps > -kMost ? steps : -kMost;
    steps = steps < kMost ? steps : kMost;
    return usable ? static_cast<int8_t>(bits_as<int32_t>(steps + kWhole)) : static_cast<int8_t>(0);
  }
  HDET_BOTH float value(Code code) const { return static_cast<float>(code) * scale; }
};

// Calls run.operator()<F>() with the format.
template <typename Run>
void with_format(int64_t format, Run&& run) {
  switch (static_cast<Format>(format)) {
    case Format::bf16:
      return run.template operator()<Bf16>();
    case Format::int8:
      return run.template operator()<Int8>();
  }
  fail("unknown format ", format);
}

// One encoded shard: the codes of its elements, then the scales of its blocks if the format has scales.
template <typename F>
struct Shard {
  typename F::Code* codes;
  float* scales;

  HDET_BOTH F format(int64_t block) const {
    if constexpr (F::kScaled) return {scales[block]};
    return {};
  }
  HDET_BOTH void keep(int64_t block, const F& format) const {
    if constexpr (F::kScaled) scales[block] = format.scale;
  }
};

// `rows` encoded shards of `shard` elements each, one after the other.
template <typename F>
struct Wire {
  uint8_t* bytes;
  int64_t rows;
  int64_t shard;

  static HDET_BOTH int64_t row_bytes(int64_t shard) {
    return shard * static_cast<int64_t>(sizeof(typename F::Code)) + (F::kScaled ? shard / kShared * 4 : 0);
  }
  HDET_BOTH int64_t blocks() const { return shard / kShared; }
  HDET_BOTH Shard<F> row(int64_t index) const {
    uint8_t* begin = bytes + index * row_bytes(shard);
    return {reinterpret_cast<typename F::Code*>(begin),
            reinterpret_cast<float*>(begin + shard * static_cast<int64_t>(sizeof(typename F::Code)))};
  }
};

// A wire of `rows` rows. The bytes of a row and the format determine the elements of a shard.
template <typename F>
Wire<F> checked_wire(const Tensor& tensor, const char* name, int64_t rows, const Tensor& like) {
  HDET_CHECK(rows > 0, name, " must have rows, got ", rows);
  auto* bytes = checked<uint8_t>(tensor, name, ScalarType::Byte, tensor.numel(), like);
  HDET_CHECK(tensor.numel() % rows == 0, name, " must be rows of equal length");
  const int64_t grains = tensor.numel() / rows / Wire<F>::row_bytes(kGrain);
  const Wire<F> wire{bytes, rows, grains * kGrain};
  HDET_CHECK(tensor.numel() == rows * Wire<F>::row_bytes(wire.shard), name, " must have rows of a multiple of ",
             Wire<F>::row_bytes(kGrain), " bytes, got ", tensor.numel() / rows);
  HDET_CHECK(reinterpret_cast<uintptr_t>(bytes) % 16 == 0, name, " must lie at a multiple of 16 bytes");
  return wire;
}

inline float* checked_floats(const std::optional<Tensor>& tensor, const char* name, int64_t numel, const Tensor& like) {
  return tensor.has_value() ? checked<float>(*tensor, name, ScalarType::Float, numel, like) : nullptr;
}

// Returns the number of rows of a tensor, which must be a matrix.
inline int64_t checked_row_count(const Tensor& tensor, const char* name) {
  HDET_CHECK(tensor.dim() == 2, name, " must have 2 dimensions, got ", tensor.dim());
  return tensor.size(0);
}

template <typename F>
struct Encoding {
  const float* x;
  const float* consensus;
  float* error;  // null for no error feedback
  int64_t numel;
  Wire<F> wire;

  static Encoding checked_of(const Tensor& x, const Tensor& consensus, const std::optional<Tensor>& error,
                             const Tensor& wire) {
    const int64_t numel = x.numel();
    const Encoding work{checked<const float>(x, "x", ScalarType::Float, numel, x),
                        checked<const float>(consensus, "consensus", ScalarType::Float, numel, x),
                        checked_floats(error, "error", numel, x), numel,
                        checked_wire<F>(wire, "wire", checked_row_count(wire, "wire"), x)};
    HDET_CHECK(numel <= work.wire.rows * work.wire.shard, "wire has place for ", work.wire.rows * work.wire.shard,
               " elements, got ", numel);
    return work;
  }
};

template <typename F>
struct Merging {
  Wire<F> wires;
  float divisor;
  float* error;  // null for no error feedback
  Wire<F> wire;

  static Merging checked_of(const Tensor& wires, double divisor, const std::optional<Tensor>& error,
                            const Tensor& wire) {
    const auto from = checked_wire<F>(wires, "wires", checked_row_count(wires, "wires"), wires);
    const auto to = checked_wire<F>(wire, "wire", 1, wires);
    HDET_CHECK(to.shard == from.shard, "wire must be one row of wires, of ", from.shard, " elements, got ", to.shard);
    return {from, static_cast<float>(divisor), checked_floats(error, "error", from.shard, wires), to};
  }
};

template <typename F>
struct Decoding {
  Wire<F> wire;
  float* consensus;
  float* target;  // null if only the consensus is written
  int64_t numel;

  static Decoding checked_of(const Tensor& wire, const Tensor& consensus, const std::optional<Tensor>& target) {
    const int64_t numel = consensus.numel();
    const Decoding work{checked_wire<F>(wire, "wire", checked_row_count(wire, "wire"), consensus),
                        checked<float>(consensus, "consensus", ScalarType::Float, numel, consensus),
                        checked_floats(target, "target", numel, consensus), numel};
    HDET_CHECK(numel <= work.wire.rows * work.wire.shard, "wire has ", work.wire.rows * work.wire.shard,
               " elements, the consensus ", numel);
    return work;
  }
};

}  // namespace hdet
