"""The CUDA source of the kernels of `kernels.py`, which says what they do and defines their sizes."""

from .cuda_decode import DECODE

COMMON = r"""
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
#define F (FK + FV)
#define NB ((NU + 15) / 16)
#define RB (2 * NU)
#define CHUNKS (RB / 16)
#define SROW ((CHUNKS % 2) ? RB : RB + 16)
#define FRAGS (NB * FK)
#define SLOTS (NB * F * 16)

#if KIND == 0
typedef float number_t;
__device__ __forceinline__ float load(const float* p, long long i) { return p[i]; }
__device__ __forceinline__ void keep(float* p, long long i, float x) { p[i] = x; }
#else
typedef u16 number_t;
#if KIND == 1
__device__ __forceinline__ float load(const u16* p, long long i) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(p[i]));
  return x;
}
__device__ __forceinline__ void keep(u16* p, long long i, float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  p[i] = y;
}
#else
__device__ __forceinline__ float load(const u16* p, long long i) { return __uint_as_float((u32)p[i] << 16); }
__device__ __forceinline__ void keep(u16* p, long long i, float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  p[i] = y;
}
#endif
#endif

__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void half_mma(u32* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%0,%1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldsm(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
__device__ __forceinline__ void ldsmt(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
__device__ __forceinline__ u32 hfma(u32 a, u32 b, u32 c) {
  u32 x;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  return x;
}
__device__ __forceinline__ u32 hneg(u32 a) {
  u32 x;
  asm("neg.f16x2 %0, %1;" : "=r"(x) : "r"(a));
  return x;
}
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(hi), "f"(lo));
  return x;
}
__device__ __forceinline__ u32 turned(u32 a) {
  u32 x;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(a));
  return x;
}
__device__ __forceinline__ float ex2(float a) {
  float x;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(a));
  return x;
}
__device__ __forceinline__ float scale_of(u32 e) {
  float x = (float)e;
  return ex2(x * x * 0.03125f);
}
"""

JOIN = r"""
// What all parts have gathered, with the tokens that are not coded: the first of a sequence, and the current one.
// A program serves up to GQ queries of one key head.
#define JOIN_THREADS 256
#define COLUMNS (DV <= 32 ? 32 : DV <= 64 ? 64 : 128)
#define GROUPS (JOIN_THREADS / COLUMNS)
extern "C" __global__ void __launch_bounds__(JOIN_THREADS)
    join(const float* gathered, const float4* logs, const float* offsets, const float* values_of,
         const float* value_mean, const number_t* q, const number_t* first_keys, const number_t* first_values,
         const number_t* key, const number_t* value, const u8* seen, number_t* out, const long long* high,
         const long long* starts, double scaling, int parts, int first, int key_heads, int set_heads,
         int seen_stride) {
  extern __shared__ float numbers[];  // GQ × SLOTS, then GQ × (first + 1) scores of exact tokens, then sums of groups
  float* exact = numbers + GQ * SLOTS;
  float* sums = exact + GQ * (first + 1);
  __shared__ float4 weights[GQ];  // of all parts: total, keys' codes, values' codes; exact tokens
  __shared__ float most[GQ];
  const int g = blockIdx.x / TURNS, b = blockIdx.y, set = g / set_heads, turn = blockIdx.x % TURNS,
            asked = min(GQ, G - turn * GQ), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long head0 = ((long long)b * key_heads + g) * G + turn * GQ;
  const int last = (int)*high, start = (int)starts[b];
  for (int i = warp; i < asked * (first + 1); i += JOIN_THREADS / 32) {
    const int n = i / (first + 1), e = i % (first + 1), at = start + e;  // the last one is the current token
    bool visible = e == first || (at >= 0 && at < last);
#if MASKED
    visible = visible && seen[b * seen_stride + (e == first ? last : at)] != 0;
#endif
    float dot = 0.f;
    if (visible) {
      const number_t* keys = e == first ? key + ((long long)b * key_heads + g) * D
                                        : first_keys + (((long long)b * key_heads + g) * first + e) * D;
      for (int d = lane; d < D; d += 32) dot += load(q, (head0 + n) * D + d) * load(keys, d);
    }
    for (int o = 16; o; o >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, o);
    if (lane == 0) exact[i] = visible ? dot * (float)scaling : -1e30f;
  }
  __syncthreads();
  for (int n = warp; n < asked; n += JOIN_THREADS / 32) {
    const float4* log = logs + (head0 + n) * parts;
    float* own = exact + n * (first + 1);
    float top = -1e30f;
    for (int i = lane; i < parts; i += 32) top = fmaxf(top, log[i].x);
    for (int i = lane; i <= first; i += 32) top = fmaxf(top, own[i]);
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int i = lane; i < parts; i += 32) {
      const float4 l = log[i];
      const float w = ex2(l.x - top);
      sum.x += w * l.y;
      sum.y += w * l.z;
      sum.z += w * l.w;
    }
    for (int i = lane; i <= first; i += 32) sum.w += own[i] = ex2(own[i] - top);
    for (int o = 16; o; o >>= 1) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, o);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, o);
      sum.z += __shfl_xor_sync(0xffffffffu, sum.z, o);
      sum.w += __shfl_xor_sync(0xffffffffu, sum.w, o);
    }
    if (lane == 0) {
      most[n] = top;
      weights[n] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GQ * SLOTS; i += JOIN_THREADS) {
    const int n = min(i / SLOTS, asked - 1), s = i % SLOTS;
    const long long row = (head0 + n) * parts;
    float sum = 0.f;
    for (int j = 0; j < parts; j++) sum += ex2(logs[row + j].x - most[n]) * gathered[(row + j) * SLOTS + s];
    numbers[i] = sum - offsets[set * SLOTS + s] * ((s / 16) % F < FK ? weights[n].y : weights[n].z);
  }
  __syncthreads();
  const int j = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
  float sum[GQ];
#pragma unroll
  for (int n = 0; n < GQ; n++) sum[n] = 0.f;
  if (j < DV) {
    const float* own = values_of + (long long)g * SLOTS * DV + j;
#pragma unroll 8
    for (int s = group; s < SLOTS; s += GROUPS) {
      const float w = own[(long long)s * DV];
#pragma unroll
      for (int n = 0; n < GQ; n++) sum[n] += w * numbers[n * SLOTS + s];
    }
  }
#pragma unroll
  for (int n = 0; n < GQ; n++) sums[(n * GROUPS + group) * COLUMNS + j] = sum[n];
  __syncthreads();
  for (int i = threadIdx.x; i < asked * DV; i += JOIN_THREADS) {
    const int n = i / DV, d = i % DV;
    const float* own = exact + n * (first + 1);
    float x = weights[n].x * value_mean[g * DV + d];
#pragma unroll
    for (int c = 0; c < GROUPS; c++) x += sums[(n * GROUPS + c) * COLUMNS + d];
    for (int e = 0; e < first; e++)
      if (own[e] > 0.f)
        x += own[e] * load(first_values, (((long long)b * key_heads + g) * first + e) * DV + d);
    x += own[first] * load(value, ((long long)b * key_heads + g) * DV + d);
    keep(out, (head0 + n) * DV + d, x / (weights[n].x + weights[n].w));
  }
}
"""

ENCODE = r"""
#define ENCODE_THREADS 256

// to[i] = Σ in[j] · map[j][i] for every row, or to[i] less that sum. The terms of a sum are divided among threads.
__device__ __forceinline__ void contract(float* to, const float* in, int n, const float* map, int slots, bool less) {
  __shared__ float parts[ENCODE_ROWS][ENCODE_THREADS];
  const int width = slots <= 32 ? 32 : slots <= 64 ? 64 : slots <= 128 ? 128 : ENCODE_THREADS;
  const int groups = ENCODE_THREADS / width, group = threadIdx.x / width, lane = threadIdx.x % width;
  for (int i = lane; i - lane < slots; i += width) {
    float sum[ENCODE_ROWS];
#pragma unroll
    for (int r = 0; r < ENCODE_ROWS; r++) sum[r] = 0.f;
    if (i < slots) {
#pragma unroll 16
      for (int j = group; j < n; j += groups) {
        const float w = map[(long long)j * slots + i];
#pragma unroll
        for (int r = 0; r < ENCODE_ROWS; r++) sum[r] += in[r * ROW_NUMBERS + j] * w;
      }
    }
#pragma unroll
    for (int r = 0; r < ENCODE_ROWS; r++) parts[r][threadIdx.x] = sum[r];
    __syncthreads();
    for (int r = group; r < ENCODE_ROWS && i < slots; r += groups) {
      float whole = 0.f;
      for (int g = 0; g < groups; g++) whole += parts[r][g * width + lane];
      float* at = to + r * ROW_NUMBERS + i;
      *at = less ? *at - whole : whole;
    }
    __syncthreads();
  }
}

// One new token of ENCODE_ROWS sequences: their rows of units and their exponents, for one set of heads. A warp rounds
// the codes of a row.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS)
    encode(const number_t* key, const number_t* value, const long long* positions, const int* order,
           const float* rates, const float* key_mean, const float* value_mean, const float* key_encode,
           const float* predict, const float* value_encode, const float* levels, const int* offsets, u16* rows,
           u8* exponents, int pairs, int key_heads, int set_heads, int batch) {
  extern __shared__ float numbers[];  // of every row: keys, values, codes of all slots
  const int set = blockIdx.x, b0 = blockIdx.y * ENCODE_ROWS, sets = gridDim.x, n_keys = set_heads * D,
            n_values = set_heads * DV, inputs = FV ? n_keys : n_keys + n_values;
  __shared__ float level_of[NU * F];
  __shared__ u8 offset_of[NU * F];
  for (int i = threadIdx.x; i < NU * F; i += ENCODE_THREADS) {
    level_of[i] = levels[(long long)set * NU * F + i];
    offset_of[i] = (u8)offsets[(long long)set * NU * F + i];
  }
  for (int i = threadIdx.x; i < ENCODE_ROWS * n_keys; i += ENCODE_THREADS) {
    const int r = i / n_keys, j = i % n_keys, b = min(b0 + r, batch - 1);
    const int head = set * set_heads + j / D, p = j % D;
    const long long own = ((long long)b * key_heads + head) * D;
    float k = load(key, own + order[p]);
    if (p < 2 * pairs) {
      const int pair = p % pairs;
      double angle = (double)rates[pair] * (double)positions[b];
      angle -= 6.283185307179586 * rint(angle * 0.15915494309189535);
      float s, c;
      sincosf((float)angle, &s, &c);
      const float other = load(key, own + order[p < pairs ? p + pairs : p - pairs]);
      k = p < pairs ? k * c + other * s : k * c - other * s;
    }
    numbers[r * ROW_NUMBERS + j] = k - key_mean[set * n_keys + j];
  }
  for (int i = threadIdx.x; i < ENCODE_ROWS * n_values; i += ENCODE_THREADS) {
    const int r = i / n_values, j = i % n_values, b = min(b0 + r, batch - 1), head = set * set_heads + j / DV;
    numbers[r * ROW_NUMBERS + n_keys + j] =
        load(value, ((long long)b * key_heads + head) * DV + j % DV) - value_mean[set * n_values + j];
  }
  __syncthreads();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float* z = numbers + n_keys + n_values;
  u32 both = 0;  // of the row of this warp
  for (int stage = 0; stage < (FV ? 2 : 1); stage++) {
    const int slots = NU * (stage ? FV : FK), n = stage ? n_values : inputs, before = stage ? NU * FK : 0;
    const float* map = (stage ? value_encode : key_encode) + (long long)set * n * slots;
    const float* level = level_of + before;
    contract(z + before, numbers + (stage ? n_keys : 0), n, map, slots, false);
    float* y = z + before + warp * ROW_NUMBERS;
    float scale = 1.f;
    if (warp < ENCODE_ROWS) {
      float largest = 1.f;
      for (int i = lane; i < slots; i += 32)
        if (level[i] > 2.f) largest = fmaxf(largest, isnan(y[i]) ? 1.f / 0.f : fabsf(y[i]) * 2.f / level[i]);
      for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
      const u32 e = (u32)fminf(ceilf(sqrtf(log2f(largest) * 32.f)), 15.f);
      both |= e << (4 * stage);
      scale = exp2f((float)(e * e) * 0.03125f);
      for (int i = lane; i < slots; i += 32) {
        const float code = fminf(fmaxf(floorf(y[i] / scale + level[i] * 0.5f), 0.f), level[i] - 1.f);
        y[i] = stage ? code : (code - (level[i] - 1.f) * 0.5f) * scale;
      }
    }
    __syncthreads();
    if (!stage) {
      if (FV) contract(numbers + n_keys, z, slots, predict + (long long)set * slots * n_values, n_values, true);
      if (warp < ENCODE_ROWS)
        for (int i = lane; i < slots; i += 32) y[i] = rintf(y[i] / scale + (level[i] - 1.f) * 0.5f);
    }
  }
  __syncwarp();
  if (warp < ENCODE_ROWS && b0 + warp < batch) {
    const long long row = (long long)(b0 + warp) * sets + set;
    for (int u = lane; u < NU; u += 32) {
      u32 unit = 0;
      for (int f = 0; f < F; f++)
        unit |= (u32)z[warp * ROW_NUMBERS + f * NU + u] << offset_of[f * NU + u];
      rows[row * NU + u] = (u16)unit;
    }
    if (lane == 0) exponents[row] = (u8)both;
  }
}
"""

SOURCES = {name: COMMON + own for name, own in (("encode", ENCODE), ("decode", DECODE), ("join", JOIN))}
