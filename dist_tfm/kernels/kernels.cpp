// Kernels for training on a CPU. Plain C functions over contiguous arrays, without torch's headers: they compile in
// about a second. Each has a twin in plain torch that tests hold it against (dist_tfm/training/smoothing.py,
// dist_tfm/kernels/dropout.py, torch.optim.AdamW). Shapes: N rows, V tokens of the vocabulary, E elements.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <typename T>
T narrow(float x);

template <>
inline float narrow<float>(float x) {
    return x;
}

// To the nearest, ties to even; NaN stays NaN.
template <>
inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return bf16{static_cast<uint16_t>(x == x ? rounded : 0x7fc0u)};
}

// e^x for x <= 0 within 2 units in the last place; 0 below -87, NaN for NaN: 2^n times a polynomial over the rest of
// x, whose magnitude is at most ln(2) / 2. Branchless, so that loops over it become vector instructions.
inline float exponential(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float shifted = x * 1.44269504f + magic;
    const float n = shifted - magic;
    const float rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t power;
    std::memcpy(&power, &shifted, sizeof power);
    power = (power + 127u) << 23;  // the low bits of shifted hold n
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    return x < -87.0f ? 0.0f : sum * scale;
}

constexpr int64_t kBlock = 2048;  // floats summed in fp32 before they are added in fp64

inline int64_t block_end(int64_t first, int64_t size) { return first + kBlock < size ? first + kBlock : size; }

struct Scan {
    float largest;
    double total;
};

// The row in fp32, with the bias added; its largest score and the sum of its scores.
template <typename T>
Scan widen_row(const T* scores, const float* bias, int64_t size, float* row) {
    Scan scan{-std::numeric_limits<float>::infinity(), 0.0};
    for (int64_t first = 0; first < size; first += kBlock) {
        const int64_t last = block_end(first, size);
        float largest = scan.largest, total = 0.0f;
        if (bias != nullptr) {
#pragma omp simd
            for (int64_t i = first; i < last; ++i) row[i] = widen(scores[i]) + bias[i];
        } else {
#pragma omp simd
            for (int64_t i = first; i < last; ++i) row[i] = widen(scores[i]);
        }
#pragma omp simd reduction(max : largest) reduction(+ : total)
        for (int64_t i = first; i < last; ++i) {
            largest = row[i] > largest ? row[i] : largest;
            total += row[i];
        }
        scan.largest = largest;
        scan.total += total;
    }
    return scan;
}

// Turns the row into exponentials of scores less the largest one; their sum.
double exponentiate(float* row, int64_t size, float largest) {
    double sum = 0.0;
    for (int64_t first = 0; first < size; first += kBlock) {
        const int64_t last = block_end(first, size);
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t i = first; i < last; ++i) {
            row[i] = exponential(row[i] - largest);
            part += row[i];
        }
        sum += part;
    }
    return sum;
}

// Softmax less smoothed target, from the exponentials.
template <typename T>
void write_slopes(const float* row, int64_t size, double sum, int64_t label, double smoothing, T* slopes) {
    const float scale = static_cast<float>(1.0 / sum), share = static_cast<float>(smoothing / size);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) slopes[i] = narrow<T>(row[i] * scale - share);
    slopes[label] = narrow<T>(row[label] * scale - share + static_cast<float>(smoothing - 1.0));
}

template <typename T>
int cross_entropy(T* scores, const float* bias, const int64_t* labels, int64_t rows, int64_t size, double smoothing,
                  int differentiate, int threads, float* losses, float* nlls) {
    for (int64_t n = 0; n < rows; ++n) {
        if (labels[n] < 0 || labels[n] >= size) return 1;
    }
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<float[]> row(new float[size]);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < rows; ++n) {
            T* own = scores + n * size;
            const Scan scan = widen_row(own, bias, size, row.get());
            const float target = row[labels[n]];
            const double sum = exponentiate(row.get(), size, scan.largest);
            const double partition = std::log(sum) + scan.largest;
            const double nll = partition - target;
            nlls[n] = static_cast<float>(nll);
            losses[n] = static_cast<float>((1.0 - smoothing) * nll + smoothing * (partition - scan.total / size));
            if (differentiate) write_slopes(row.get(), size, sum, labels[n], smoothing, own);
        }
    }
    return 0;
}

// A permutation of 32-bit numbers whose outputs look random (Wellons' "lowbias32").
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

template <typename T>
void dropout(const T* x, T* y, int64_t size, uint64_t key, uint32_t threshold, float scale, int threads) {
    const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t drawn = mix(mix(static_cast<uint32_t>(i) + low) ^ high);
        y[i] = narrow<T>(widen(x[i]) * (drawn >= threshold ? scale : 0.0f));  // by 0, so that NaN stays NaN
    }
}

struct Rule {
    float rate, decay, beta2, rest1, rest2, correction, eps;  // rest: what is left to 1
};

// One pass over memory: what is read of an element is read once, and its copy in bf16 costs no second look at it.
template <bool copied>
void adam(float* weights, const float* gradients, float* means, float* squares, bf16* copies, int64_t size,
          const Rule rule, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < size; ++i) {
        const float gradient = gradients[i];
        const float mean = means[i] + rule.rest1 * (gradient - means[i]);
        const float square = squares[i] * rule.beta2 + rule.rest2 * gradient * gradient;
        const float weight =
            weights[i] * rule.decay - rule.rate * mean / (std::sqrt(square) / rule.correction + rule.eps);
        means[i] = mean;
        squares[i] = square;
        weights[i] = weight;
        if (copied) copies[i] = narrow<bf16>(weight);
    }
}

}  // namespace

extern "C" {

// Scores [N, V] and labels [N] to the smoothed loss and the nll of each row; where `differentiate`, the scores are
// overwritten by the gradient of the summed loss. bias [V], added to each row, or null. Returns 1, with nothing written,
// for a label that is no column, else 0.
int cross_entropy_bf16(void* scores, const float* bias, const int64_t* labels, int64_t rows, int64_t size,
                       double smoothing, int differentiate, int threads, float* losses, float* nlls) {
    return cross_entropy(static_cast<bf16*>(scores), bias, labels, rows, size, smoothing, differentiate, threads,
                         losses, nlls);
}

int cross_entropy_fp32(void* scores, const float* bias, const int64_t* labels, int64_t rows, int64_t size,
                       double smoothing, int differentiate, int threads, float* losses, float* nlls) {
    return cross_entropy(static_cast<float*>(scores), bias, labels, rows, size, smoothing, differentiate, threads,
                         losses, nlls);
}

// y = x times scale where the number that belongs to key and position is at least the threshold, x times 0 elsewhere.
void dropout_bf16(const void* x, void* y, int64_t size, uint64_t key, uint32_t threshold, float scale, int threads) {
    dropout(static_cast<const bf16*>(x), static_cast<bf16*>(y), size, key, threshold, scale, threads);
}

void dropout_fp32(const void* x, void* y, int64_t size, uint64_t key, uint32_t threshold, float scale, int threads) {
    dropout(static_cast<const float*>(x), static_cast<float*>(y), size, key, threshold, scale, threads);
}

// Update number `step` (from 1) of AdamW: weights [E], the running means [E] of gradients [E] and of their squares.
// copies [E], the new weights in bf16, or null.
void adam_fp32(float* weights, const float* gradients, float* means, float* squares, void* copies, int64_t size,
               double rate, double decay, double beta1, double beta2, double eps, int64_t step, int threads) {
    const double correction = 1.0 - std::pow(beta1, static_cast<double>(step));
    const Rule rule{static_cast<float>(rate / correction),
                    static_cast<float>(1.0 - rate * decay),
                    static_cast<float>(beta2),
                    static_cast<float>(1.0 - beta1),
                    static_cast<float>(1.0 - beta2),
                    static_cast<float>(std::sqrt(1.0 - std::pow(beta2, static_cast<double>(step)))),
                    static_cast<float>(eps)};
    if (copies == nullptr) {
        adam<false>(weights, gradients, means, squares, nullptr, size, rule, threads);
    } else {
        adam<true>(weights, gradients, means, squares, static_cast<bf16*>(copies), size, rule, threads);
    }
}

}
