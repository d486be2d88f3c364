// Sums over sorted edges on CPUs: weighted sums (SpMM), products of both ends (SDDMM) and graph attention.
//
// Each node's edges lie one after the other, `degrees` says how many there are. A thread takes nodes with about as many
// edges as another; what a node gets does not depend on the number of threads. Rows are read in the dtype that they are
// stored in, computed in float32, and added in blocks of 32 edges, these in blocks of 32, and so on, as graphs/structure/
// csr.py does. native_calls.py documents the arguments; absent arrays come with no elements.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kBlock = 32;  // edges, and blocks, that are added in turn
constexpr int kLanes = 16;
constexpr int kAhead = 8;  // edges whose rows are fetched before they are needed

typedef float Vector __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint32_t Unsigned __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));

inline Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

inline float sum(Vector v) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half a, b;
  std::memcpy(&a, &v, 32);
  std::memcpy(&b, reinterpret_cast<char*>(&v) + 32, 32);
  a += b;
  Quarter c, d;
  std::memcpy(&c, &a, 16);
  std::memcpy(&d, reinterpret_cast<char*>(&a) + 16, 16);
  c += d;
  return (c[0] + c[1]) + (c[2] + c[3]);
}

// exp by Cephes' polynomial: within 2 units in the last place, NaN stays, 0 below the normal numbers.
inline Vector exponential(Vector x) {
  const Vector magic = Vector{} + 12582912.0f;
  Vector n = x * 1.44269504088896341f + magic;
  Integers power;
  std::memcpy(&power, &n, sizeof n);
  n -= magic;
  Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  power = (power - 0x4B400000 + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  p *= scale;
  const Vector zero = {}, infinite = zero + std::numeric_limits<float>::infinity();
  p = x < -87.3f ? zero : p;
  return x > 88.7f ? infinite : p;
}

// Floating formats in memory.
struct Float32 {
  using Type = float;
  static Vector read(const float* p) { return load(p); }
  static float read_one(float x) { return x; }
  static float write_one(float x) { return x; }
};

struct BFloat16 {
  using Type = uint16_t;
  static Vector read(const uint16_t* p) {
    Shorts s;
    std::memcpy(&s, p, sizeof s);
    const Unsigned bits = __builtin_convertvector(s, Unsigned) << 16;
    Vector v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  static float read_one(uint16_t x) {
    const uint32_t bits = uint32_t{x} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof bits);
    return result;
  }
  static uint16_t write_one(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bits >> 16) | 0x40;  // NaN, whatever would be rounded
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  }
};

struct Float16 {
  using Type = uint16_t;
#if defined(__F16C__)
  static float read_one(uint16_t x) { return _cvtsh_ss(x); }
  static uint16_t write_one(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
  static float read_one(uint16_t x) {
    _Float16 half;
    std::memcpy(&half, &x, sizeof half);
    return half;
  }
  static uint16_t write_one(float x) {
    const _Float16 half = x;
    uint16_t result;
    std::memcpy(&result, &half, sizeof half);
    return result;
  }
#endif
  static Vector read(const uint16_t* p) {
#if defined(__AVX512F__)
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    Vector v;
    std::memcpy(&v, &wide, sizeof v);
    return v;
#else
    Vector v;
    for (int i = 0; i < kLanes; i++) v[i] = read_one(p[i]);
    return v;
#endif
  }
};

// Fetches `count` elements before they are needed.
template <typename T>
inline void prefetch(const T* row, size_t count) {
  const char* next = reinterpret_cast<const char*>(row);
  for (size_t c = 0; c < sizeof(T) * count; c += 64) __builtin_prefetch(next + c);
}

template <typename Format>
inline Vector read_part(const typename Format::Type* p, int count) {
  Vector v = {};
  for (int i = 0; i < count; i++) v[i] = Format::read_one(p[i]);
  return v;
}

template <typename Format>
inline float dot(const typename Format::Type* row, const float* other, int64_t width) {
  Vector total = {};
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) total += Format::read(row + c) * load(other + c);
  float result = sum(total);
  for (; c < width; c++) result += Format::read_one(row[c]) * other[c];
  return result;
}

float read_any(const ffi::AnyBuffer& buffer, int64_t i) {
  switch (buffer.element_type()) {
    case ffi::DataType::F16: return Float16::read_one(static_cast<const uint16_t*>(buffer.untyped_data())[i]);
    case ffi::DataType::BF16: return BFloat16::read_one(static_cast<const uint16_t*>(buffer.untyped_data())[i]);
    default: return static_cast<const float*>(buffer.untyped_data())[i];
  }
}

// Calls `run(Format)` with the format of a buffer.
template <typename Run>
void with_format(const ffi::AnyBuffer& buffer, Run run) {
  switch (buffer.element_type()) {
    case ffi::DataType::F16: return run(Float16());
    case ffi::DataType::BF16: return run(BFloat16());
    default: return run(Float32());
  }
}

// Copies `count` elements from the place `first` on, as float32, times a scale.
void read_row(const ffi::AnyBuffer& buffer, int64_t first, int64_t count, float scale, float* row) {
  with_format(buffer, [=](auto format) {
    using Format = decltype(format);
    const auto* data = static_cast<const typename Format::Type*>(buffer.untyped_data()) + first;
    for (int64_t c = 0; c < count; c++) row[c] = Format::read_one(data[c]) * scale;
  });
}

// Writes `count` elements from the place `first` on, rounded from float32, times a scale.
void write_row(ffi::AnyBuffer& buffer, int64_t first, int64_t count, float scale, const float* row) {
  with_format(buffer, [=](auto format) {
    using Format = decltype(format);
    auto* data = static_cast<typename Format::Type*>(buffer.untyped_data()) + first;
    for (int64_t c = 0; c < count; c++) data[c] = Format::write_one(row[c] * scale);
  });
}

// Sums of rows in blocks of blocks.
class Sums {
 public:
  explicit Sums(int64_t width) : width_(width), levels_(1) { levels_[0].row.resize(width); }

  // The row that the next block is added to.
  float* row() { return levels_[0].row.data(); }

  void finish_block() {
    for (size_t i = 0; ++levels_[i].count == kBlock; i++) {
      if (i + 1 == levels_.size()) levels_.push_back({std::vector<float>(width_), 0});
      move(i, i + 1);
    }
  }

  // Returns the sum; it is gone when the next block is added.
  const float* total() {
    for (size_t i = 1; i < levels_.size(); i++) move(i - 1, i);
    return levels_.back().row.data();
  }

  void clear() {
    for (auto& level : levels_) {
      std::fill(level.row.begin(), level.row.end(), 0.0f);
      level.count = 0;
    }
  }

 private:
  struct Level {
    std::vector<float> row;
    int count = 0;
  };

  void move(size_t from, size_t to) {
    float* x = levels_[from].row.data();
    float* y = levels_[to].row.data();
    for (int64_t i = 0; i < width_; i++) {
      y[i] += x[i];
      x[i] = 0;
    }
    levels_[from].count = 0;
  }

  int64_t width_;
  std::vector<Level> levels_;
};

// Adds to `result` the rows of one block of edges, a part of `count` vectors, times weights.
template <typename Format, bool is_weighted, int count>
inline void add_part(const typename Format::Type* data, const int32_t* others, int edges, int ahead, int64_t stride,
                     const float* weights, int64_t heads, float* result) {
  Vector total[count] = {};
  for (int j = 0; j < edges; j++) {
    if (j < ahead) {
      prefetch(data + others[j + kAhead] * stride, kLanes * count);
    }
    const auto* row = data + others[j] * stride;
    for (int k = 0; k < count; k++) {
      const Vector x = Format::read(row + k * kLanes);
      total[k] += is_weighted ? x * weights[j * heads] : x;
    }
  }
  for (int k = 0; k < count; k++) store(result + k * kLanes, load(result + k * kLanes) + total[k]);
}

// Adds to `result` [heads * width] the rows of one block; weights are [edges, heads].
template <typename Format, bool is_weighted>
void add_rows(const typename Format::Type* data, const int32_t* others, int edges, int ahead, int64_t heads,
              int64_t width, const float* weights, float* result) {
  const int64_t stride = heads * width;
  for (int64_t h = 0; h < heads; h++) {
    const int64_t end = (h + 1) * width;
    int64_t c = h * width;
#define PART(count)                                                                                             \
  for (; c + count * kLanes <= end; c += count * kLanes)                                                        \
    add_part<Format, is_weighted, count>(data + c, others, edges, ahead, stride, weights + h, heads, result + c);
    PART(16) PART(8) PART(4) PART(2) PART(1)
#undef PART
    if (c == end) continue;
    Vector total = {};
    for (int j = 0; j < edges; j++) {
      const Vector x = read_part<Format>(data + others[j] * stride + c, end - c);
      total += is_weighted ? x * weights[j * heads + h] : x;
    }
    for (int i = 0; c + i < end; i++) result[c + i] += total[i];
  }
}

// Runs `task(first, last)` on ranges of nodes of about as many edges, until all are done.
template <typename Task>
void over_nodes(ffi::ThreadPool& pool, const std::vector<int64_t>& starts, Task task) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  const int64_t nodes = starts.size() - 1, threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t share = (starts[nodes] + nodes) / (threads * 16) + 1;
  std::vector<int64_t> bounds = {0};
  for (int64_t i = 1; i <= nodes; i++) {
    if (i == nodes || starts[i] + i - starts[bounds.back()] - bounds.back() >= share) bounds.push_back(i);
  }
  const int64_t count = bounds.size() - 1;
  auto state = std::make_shared<State>();
  // A helper that starts when all is done touches the state alone, which is its own too.
  auto work = [state, count, &bounds, &task] {
    for (int64_t i; (i = state->next++) < count;) {
      task(bounds[i], bounds[i + 1]);
      if (++state->done == count) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_all();
      }
    }
  };
  for (int64_t i = 1; i < std::min(threads, count); i++) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == count; });
}

template <typename T>
const T* or_null(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<const T*>(buffer.untyped_data()) : nullptr;
}

// Whether all ids are from 0 to below a number of rows.
bool all_below(const int32_t* ids, int64_t count, int64_t rows) {
  const auto bound = static_cast<uint32_t>(std::min<int64_t>(rows, std::numeric_limits<int32_t>::max()));
  uint32_t is_beyond = 0;  // without a branch, the loop is one of vectors
  for (int64_t i = 0; i < count; i++) is_beyond |= static_cast<uint32_t>(ids[i]) >= bound;
  return !is_beyond;
}

int64_t rows_of(const ffi::AnyBuffer& buffer) { return buffer.dimensions()[0]; }

ffi::Error edited(const std::string& fault) {
  return ffi::Error::InvalidArgument(
      "the graph's index arrays are not those that it was made with: " + fault +
      ". Change features by with_nodes and with_edges, and make another graph for other edges.");
}

// Finds where each node's edges begin, and an error where an id, degree or number of rows is out of bounds, as in a
// graph whose leaves were edited. That takes one look at each id, and nothing next to reading the rows.
//
//   edges: which edge each is, from 0 to below `num_edges`; no elements if these are not read.
//   num_others: how many rows the nodes at the other ends have.
//   of_nodes: how many rows there are of the nodes at this end, in several arrays.
ffi::Error find_starts(const ffi::AnyBuffer& others, const ffi::AnyBuffer& degrees, const ffi::AnyBuffer* edges,
                       int64_t num_others, int64_t num_edges, std::initializer_list<int64_t> of_nodes,
                       std::vector<int64_t>& starts) {
  const auto* counts = degrees.typed_data<int32_t>();
  const int64_t nodes = degrees.element_count();
  for (int64_t rows : of_nodes) {
    if (rows != nodes) return edited(std::to_string(nodes) + " degrees for " + std::to_string(rows) + " nodes");
  }
  starts.assign(nodes + 1, 0);
  for (int64_t i = 0; i < nodes; i++) {
    if (counts[i] < 0) return edited("a degree is " + std::to_string(counts[i]));
    starts[i + 1] = starts[i] + counts[i];
  }
  const int64_t all = starts[nodes], known = others.element_count();
  if (all > known) {
    return edited("degrees add up to " + std::to_string(all) + " of " + std::to_string(known) + " edges");
  }
  if (!all_below(others.typed_data<int32_t>(), all, num_others)) {
    return edited("an edge ends at none of the " + std::to_string(num_others) + " nodes");
  }
  if (edges && (all > static_cast<int64_t>(edges->element_count()) ||
                !all_below(edges->typed_data<int32_t>(), all, num_edges))) {
    return edited("a place is not one of the " + std::to_string(num_edges) + " edges");
  }
  return ffi::Error::Success();
}

// How many edges of a block have another one `kAhead` places on.
int ahead_of(int64_t edge, int64_t last_edge) {
  return static_cast<int>(std::min<int64_t>(kBlock, std::max<int64_t>(0, last_edge - edge - kAhead)));
}

ffi::Error weighted_sum(ffi::ThreadPool pool, ffi::AnyBuffer others_, ffi::AnyBuffer degrees, ffi::AnyBuffer edges_,
                        ffi::AnyBuffer data, ffi::AnyBuffer weights, ffi::AnyBuffer senders, ffi::AnyBuffer receivers,
                        ffi::Result<ffi::AnyBuffer> result) {
  const auto* of_senders = or_null<float>(senders);
  const auto* of_receivers = or_null<float>(receivers);
  const bool has_weights = weights.element_count() > 0;
  std::vector<int64_t> starts;
  const int64_t num_others = of_senders ? std::min(rows_of(data), rows_of(senders)) : rows_of(data);
  const int64_t num_scales = of_receivers ? rows_of(receivers) : rows_of(*result);
  const auto fault = find_starts(others_, degrees, has_weights ? &edges_ : nullptr, num_others, rows_of(weights),
                                 {rows_of(*result), num_scales}, starts);
  if (fault.failure()) return fault;
  const auto* others = others_.typed_data<int32_t>();
  const auto* edges = or_null<int32_t>(edges_);
  const int64_t all = data.dimensions()[1] * data.dimensions()[2];
  const int64_t heads = has_weights ? weights.dimensions()[1] : 1, width = all / heads;
  const int64_t last_edge = starts.back();
  with_format(data, [&](auto format) {
    using Format = decltype(format);
    const auto* rows = static_cast<const typename Format::Type*>(data.untyped_data());
    over_nodes(pool, starts, [&](int64_t first, int64_t last) {
      Sums sums(all);
      std::vector<float> factors(kBlock * heads);
      for (int64_t node = first; node < last; node++) {
        sums.clear();
        for (int64_t e = starts[node]; e < starts[node + 1]; e += kBlock) {
          const int count = std::min<int64_t>(kBlock, starts[node + 1] - e), ahead = ahead_of(e, last_edge);
          if (has_weights || of_senders) {
            for (int j = 0; j < count; j++) {
              const float scale = of_senders ? of_senders[others[e + j]] : 1;
              for (int64_t h = 0; h < heads; h++) {
                factors[j * heads + h] = has_weights ? read_any(weights, edges[e + j] * heads + h) * scale : scale;
              }
            }
            add_rows<Format, true>(rows, others + e, count, ahead, heads, width, factors.data(), sums.row());
          } else {
            add_rows<Format, false>(rows, others + e, count, ahead, heads, width, nullptr, sums.row());
          }
          sums.finish_block();
        }
        const float* total = sums.total();
        const float scale = of_receivers ? of_receivers[node] : 1;
        write_row(*result, node * all, all, scale, total);
      }
    });
  });
  return ffi::Error::Success();
}

ffi::Error edge_dot(ffi::ThreadPool pool, ffi::AnyBuffer others_, ffi::AnyBuffer degrees, ffi::AnyBuffer edges_,
                    ffi::AnyBuffer data, ffi::AnyBuffer nodes, ffi::AnyBuffer senders, ffi::AnyBuffer receivers,
                    ffi::Result<ffi::AnyBuffer> result) {
  const auto* of_senders = or_null<float>(senders);
  const auto* of_receivers = or_null<float>(receivers);
  std::vector<int64_t> starts;
  const int64_t num_others = of_senders ? std::min(rows_of(data), rows_of(senders)) : rows_of(data);
  const int64_t num_scales = of_receivers ? rows_of(receivers) : rows_of(nodes);
  const auto fault = find_starts(others_, degrees, &edges_, num_others, rows_of(*result), {rows_of(nodes), num_scales},
                                 starts);
  if (fault.failure()) return fault;
  const auto* others = others_.typed_data<int32_t>();
  const auto* edges = edges_.typed_data<int32_t>();
  const int64_t heads = data.dimensions()[1], width = data.dimensions()[2], all = heads * width;
  const int64_t last_edge = starts.back();
  if (last_edge < result->dimensions()[0]) std::memset(result->untyped_data(), 0, result->size_bytes());
  with_format(data, [&](auto format) {
    using Format = decltype(format);
    const auto* rows = static_cast<const typename Format::Type*>(data.untyped_data());
    over_nodes(pool, starts, [&](int64_t first, int64_t last) {
      std::vector<float> own(all), products(heads);
      for (int64_t node = first; node < last; node++) {
        const float scale = of_receivers ? of_receivers[node] : 1;
        read_row(nodes, node * all, all, scale, own.data());
        for (int64_t e = starts[node]; e < starts[node + 1]; e++) {
          if (e + kAhead < last_edge) prefetch(rows + others[e + kAhead] * all, all);
          const float factor = of_senders ? of_senders[others[e]] : 1;
          const auto* row = rows + others[e] * all;
          for (int64_t h = 0; h < heads; h++) products[h] = dot<Format>(row + h * width, own.data() + h * width, width);
          write_row(*result, int64_t{edges[e]} * heads, heads, factor, products.data());
        }
      }
    });
  });
  return ffi::Error::Success();
}

inline float leaky(float x, float slope) { return x >= 0 ? x : slope * x; }

void exponentials(float* x, int64_t count) {  // with room for whole vectors
  for (int64_t i = 0; i < count; i += kLanes) store(x + i, exponential(load(x + i)));
}

int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

ffi::Error gat_forward(ffi::ThreadPool pool, ffi::AnyBuffer others_, ffi::AnyBuffer degrees, ffi::AnyBuffer features,
                       ffi::AnyBuffer left_, ffi::AnyBuffer right_, float slope, ffi::Result<ffi::AnyBuffer> result,
                       ffi::Result<ffi::AnyBuffer> largest_, ffi::Result<ffi::AnyBuffer> inverse_) {
  std::vector<int64_t> starts;
  const auto fault = find_starts(others_, degrees, nullptr, std::min(rows_of(features), rows_of(left_)), 0,
                                 {rows_of(*result), rows_of(right_)}, starts);
  if (fault.failure()) return fault;
  const auto* others = others_.typed_data<int32_t>();
  const auto *left = left_.typed_data<float>(), *right = right_.typed_data<float>();
  auto *largest = largest_->typed_data<float>(), *inverse = inverse_->typed_data<float>();
  const int64_t heads = features.dimensions()[1], width = features.dimensions()[2], all = heads * width;
  const int64_t last_edge = starts.back();
  with_format(features, [&](auto format) {
    using Format = decltype(format);
    const auto* rows = static_cast<const typename Format::Type*>(features.untyped_data());
    over_nodes(pool, starts, [&](int64_t first, int64_t last) {
      Sums sums(all);
      std::vector<float> powers(whole_vectors(kBlock * heads));
      std::vector<double> sizes(heads);
      for (int64_t node = first; node < last; node++) {
        const float* own = right + node * heads;
        float* most = largest + node * heads;
        std::fill(most, most + heads, -std::numeric_limits<float>::infinity());
        for (int64_t e = starts[node]; e < starts[node + 1]; e++) {
          const float* other = left + others[e] * heads;
          for (int64_t h = 0; h < heads; h++) most[h] = std::max(most[h], leaky(other[h] + own[h], slope));
        }
        for (int64_t h = 0; h < heads; h++) most[h] = most[h] - most[h] == 0 ? most[h] : 0;
        sums.clear();
        std::fill(sizes.begin(), sizes.end(), 0.0);
        for (int64_t e = starts[node]; e < starts[node + 1]; e += kBlock) {
          const int count = std::min<int64_t>(kBlock, starts[node + 1] - e);
          for (int j = 0; j < count; j++) {
            const float* other = left + others[e + j] * heads;
            for (int64_t h = 0; h < heads; h++) powers[j * heads + h] = leaky(other[h] + own[h], slope) - most[h];
          }
          exponentials(powers.data(), count * heads);
          add_rows<Format, true>(rows, others + e, count, ahead_of(e, last_edge), heads, width, powers.data(),
                                 sums.row());
          for (int j = 0; j < count; j++) {
            for (int64_t h = 0; h < heads; h++) sizes[h] += powers[j * heads + h];
          }
          sums.finish_block();
        }
        const float* total = sums.total();
        for (int64_t h = 0; h < heads; h++) {
          const float size = sizes[h], scale = 1 / (size == 0 ? 1 : size);
          inverse[node * heads + h] = scale;
          write_row(*result, node * all + h * width, width, scale, total + h * width);
        }
      }
    });
  });
  return ffi::Error::Success();
}

ffi::Error gat_of_receivers(ffi::ThreadPool pool, ffi::AnyBuffer others_, ffi::AnyBuffer degrees,
                            ffi::AnyBuffer features, ffi::AnyBuffer left_, ffi::AnyBuffer right_,
                            ffi::AnyBuffer largest_, ffi::AnyBuffer inverse_, ffi::AnyBuffer gradient, float slope,
                            ffi::Result<ffi::AnyBuffer> mean_, ffi::Result<ffi::AnyBuffer> of_right_) {
  std::vector<int64_t> starts;
  const auto fault = find_starts(others_, degrees, nullptr, std::min(rows_of(features), rows_of(left_)), 0,
                                 {rows_of(right_), rows_of(gradient), rows_of(*mean_)}, starts);
  if (fault.failure()) return fault;
  const auto* others = others_.typed_data<int32_t>();
  const auto *left = left_.typed_data<float>(), *right = right_.typed_data<float>();
  const auto *largest = largest_.typed_data<float>(), *inverse = inverse_.typed_data<float>();
  auto *mean = mean_->typed_data<float>(), *of_right = of_right_->typed_data<float>();
  const int64_t heads = features.dimensions()[1], width = features.dimensions()[2], all = heads * width;
  const int64_t last_edge = starts.back();
  with_format(features, [&](auto format) {
    using Format = decltype(format);
    const auto* rows = static_cast<const typename Format::Type*>(features.untyped_data());
    over_nodes(pool, starts, [&](int64_t first, int64_t last) {
      // Their differences are small: float64 leaves them exact.
      std::vector<double> means(heads), products(heads), parts(heads);
      std::vector<float> powers(whole_vectors(kBlock * heads)), slopes(kBlock * heads), own(all);
      for (int64_t node = first; node < last; node++) {
        const int64_t base = node * heads;
        read_row(gradient, node * all, all, 1, own.data());
        for (auto* sums : {&means, &products, &parts}) std::fill(sums->begin(), sums->end(), 0.0);
        for (int64_t e = starts[node]; e < starts[node + 1]; e += kBlock) {
          const int count = std::min<int64_t>(kBlock, starts[node + 1] - e);
          for (int j = 0; j < count; j++) {
            const float* other = left + others[e + j] * heads;
            for (int64_t h = 0; h < heads; h++) {
              const float logit = other[h] + right[base + h];
              slopes[j * heads + h] = logit >= 0 ? 1 : slope;
              powers[j * heads + h] = leaky(logit, slope) - largest[base + h];
            }
          }
          exponentials(powers.data(), count * heads);
          for (int j = 0; j < count; j++) {
            if (e + j + kAhead < last_edge) prefetch(rows + others[e + j + kAhead] * all, all);
            for (int64_t h = 0; h < heads; h++) {
              const float product = dot<Format>(rows + others[e + j] * all + h * width, own.data() + h * width, width);
              const double weight = powers[j * heads + h] * inverse[base + h], part = weight * slopes[j * heads + h];
              means[h] += weight * product;
              products[h] += part * product;
              parts[h] += part;
            }
          }
        }
        for (int64_t h = 0; h < heads; h++) {
          mean[base + h] = means[h];
          of_right[base + h] = products[h] - means[h] * parts[h];
        }
      }
    });
  });
  return ffi::Error::Success();
}

// `targets` [receivers, heads, 4] has right, largest, inverse and mean.
ffi::Error gat_of_senders(ffi::ThreadPool pool, ffi::AnyBuffer others_, ffi::AnyBuffer degrees, ffi::AnyBuffer features,
                          ffi::AnyBuffer left_, ffi::AnyBuffer targets_, ffi::AnyBuffer gradient, float slope,
                          ffi::Result<ffi::AnyBuffer> of_features, ffi::Result<ffi::AnyBuffer> of_left_) {
  std::vector<int64_t> starts;
  const auto fault = find_starts(others_, degrees, nullptr, std::min(rows_of(targets_), rows_of(gradient)), 0,
                                 {rows_of(features), rows_of(left_)}, starts);
  if (fault.failure()) return fault;
  const auto* others = others_.typed_data<int32_t>();
  const auto *left = left_.typed_data<float>(), *targets = targets_.typed_data<float>();
  auto* of_left = of_left_->typed_data<float>();
  const int64_t heads = features.dimensions()[1], width = features.dimensions()[2], all = heads * width;
  const int64_t last_edge = starts.back();
  with_format(gradient, [&](auto format) {
    using Format = decltype(format);
    const auto* rows = static_cast<const typename Format::Type*>(gradient.untyped_data());
    over_nodes(pool, starts, [&](int64_t first, int64_t last) {
      Sums sums(all);
      std::vector<float> powers(whole_vectors(kBlock * heads)), own(all);
      std::vector<double> of_logits(heads);
      for (int64_t node = first; node < last; node++) {
        const float* here = left + node * heads;
        read_row(features, node * all, all, 1, own.data());
        sums.clear();
        std::fill(of_logits.begin(), of_logits.end(), 0.0);
        for (int64_t e = starts[node]; e < starts[node + 1]; e += kBlock) {
          const int count = std::min<int64_t>(kBlock, starts[node + 1] - e);
          for (int j = 0; j < count; j++) {
            const float* target = targets + others[e + j] * heads * 4;
            for (int64_t h = 0; h < heads; h++) {
              powers[j * heads + h] = leaky(here[h] + target[4 * h], slope) - target[4 * h + 1];
            }
          }
          exponentials(powers.data(), count * heads);
          for (int j = 0; j < count; j++) {
            const float* target = targets + others[e + j] * heads * 4;
            for (int64_t h = 0; h < heads; h++) powers[j * heads + h] *= target[4 * h + 2];
          }
          add_rows<Format, true>(rows, others + e, count, ahead_of(e, last_edge), heads, width, powers.data(),
                                 sums.row());
          for (int j = 0; j < count; j++) {
            const float* target = targets + others[e + j] * heads * 4;
            for (int64_t h = 0; h < heads; h++) {
              const float product = dot<Format>(rows + others[e + j] * all + h * width, own.data() + h * width, width);
              const float part = powers[j * heads + h] * (here[h] + target[4 * h] >= 0 ? 1 : slope);
              of_logits[h] += part * (product - target[4 * h + 3]);
            }
          }
          sums.finish_block();
        }
        const float* total = sums.total();
        write_row(*of_features, node * all, all, 1, total);
        for (int64_t h = 0; h < heads; h++) of_left[node * heads + h] = of_logits[h];
      }
    });
  });
  return ffi::Error::Success();
}

}  // namespace

#define ARRAY .Arg<ffi::AnyBuffer>()
#define RESULT .Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmp_weighted_sum, weighted_sum,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY RESULT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmp_edge_dot, edge_dot,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY RESULT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmp_gat_forward, gat_forward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() ARRAY ARRAY ARRAY ARRAY ARRAY.Attr<float>("slope")
                                  RESULT RESULT RESULT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmp_gat_of_receivers, gat_of_receivers,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY
                                  .Attr<float>("slope") RESULT RESULT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmp_gat_of_senders, gat_of_senders,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() ARRAY ARRAY ARRAY ARRAY ARRAY ARRAY
                                  .Attr<float>("slope") RESULT RESULT);
