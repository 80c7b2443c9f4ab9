"""The CUDA source of the kernels of `kernels.py`, which says what they do and defines their sizes."""

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
#define F (FK + FV)
#define NB ((NU + 15) / 16)
#define RB (2 * NU)
#define CHUNKS (RB / 16)
#define SROW ((CHUNKS % 2) ? RB : RB + 16)
#define ROWS (16 * MT)
#define SLOT (ROWS * SROW + 32)
#define FRAGS (NB * FK)
#define NT (D2 / 8)
#define KS (D2 / 16)
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
__device__ __forceinline__ void mma0(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                                     float4 z = make_float4(0.f, 0.f, 0.f, 0.f)) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(z.x), "f"(z.y), "f"(z.z), "f"(z.w));
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
__device__ __forceinline__ u32 number(u32 w, u32 m) {
  u32 x;
  asm("lop3.b32 %0, %1, %2, 0x64006400, 0xEA;" : "=r"(x) : "r"(w), "r"(m));
  return x;
}
__device__ __forceinline__ u32 hmul(u32 a, u32 b) {
  u32 x;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
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

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    decode(const number_t* q, const u8* codes, const u8* exponents_of, const u8* seen, const uint2* key_masks,
           const uint2* all_masks, const uint2* maps, const float4* starts, const float* mean, const float* gains,
           const float* rates, const int* places, const uint4* table, float* out, float* logs, const int* low,
           const int* high, const int* origins, double scaling, int tokens, int key_heads, int set_heads,
           int seen_stride) {
  extern __shared__ __align__(128) u8 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3;
  const int part = blockIdx.x, g = blockIdx.y / TURNS, b = blockIdx.z, set = g / set_heads,
            sets = key_heads / set_heads;
  const int asks = g * G + (blockIdx.y % TURNS) * GQ, asked_here = min(GQ, G - (int)(blockIdx.y % TURNS) * GQ),
            heads = key_heads * G;
  uint2* smaps = (uint2*)memory;                            // fragments × 2NT × 32
  float4* sstart = (float4*)(smaps + FRAGS * 2 * NT * 32);  // 2NT × 4: what all keys start from
  uint2* skeys = (uint2*)(sstart + 2 * NT * 4);             // fragments × 4
  uint2* sall = (uint2*)(skeys + FRAGS * 4);                // NB*F × 8
  float2* steps = (float2*)(sall + NB * F * 8);             // KS*4 × 4
  uint4* turns = (uint4*)(steps + KS * 4 * 4);              // 4 × NT × 32
  float4* asked = (float4*)(turns + 4 * NT * 32) + warp * (KS * 4 * 32);
  u8* ring = (u8*)((float4*)(turns + 4 * NT * 32) + WARPS * (KS * 4 * 32)) + warp * (STAGES * SLOT);
  for (int i = threadIdx.x; i < FRAGS * 2 * NT * 32; i += 32 * WARPS)
    smaps[i] = maps[(long long)g * (FRAGS * 2 * NT * 32) + i];
  for (int i = threadIdx.x; i < FRAGS * 4; i += 32 * WARPS) skeys[i] = key_masks[set * FRAGS * 4 + i];
  for (int i = threadIdx.x; i < 4 * NT * 32; i += 32 * WARPS) turns[i] = table[i];
  for (int i = threadIdx.x; i < 2 * NT * 4; i += 32 * WARPS) sstart[i] = starts[g * (2 * NT * 4) + i];
  for (int i = threadIdx.x; i < NB * F * 8; i += 32 * WARPS) sall[i] = all_masks[set * NB * F * 8 + i];

  const int first = low[b], last = *high, origin = origins[b];
  const int c0 = first >> 6, c1 = (last + 63) >> 6;
  const int each = (c1 - c0 + gridDim.x - 1) / gridDim.x;
  const int begin = c0 + part * each + warp, end = min(c0 + (part + 1) * each, c1);

#pragma unroll
  for (int i = 0; i < KS * 4; i++) {
    const int p = 16 * (i >> 2) + 2 * tig + (i & 1) + 8 * ((i & 3) >> 1);
    float q1 = 0.f, q2 = 0.f;
    if (gid < asked_here) {
      const long long own = ((long long)b * heads + asks + gid) * D;
      const float factor = (float)scaling * gains[g];
      if (places[p] >= 0) q1 = load(q, own + places[p]) * factor;
      if (places[D2 + p] >= 0) q2 = load(q, own + places[D2 + p]) * factor;
    }
    const float rate = rates[p];
    double angle = (double)rate * (double)(64 * begin - origin);
    angle -= 6.283185307179586 * rint(angle * 0.15915494309189535);
    float s, c;
    sincosf((float)angle, &s, &c);
    const float t1 = q1 * c + q2 * s, t2 = q2 * c - q1 * s;
    const float m1 = mean[g * 2 * D2 + p] * 0.015625f, m2 = mean[g * 2 * D2 + D2 + p] * 0.015625f;
    asked[i * 32 + lane] = make_float4(t1, t2, t1 * m1 + t2 * m2, t2 * m1 - t1 * m2);
    if (warp == 0 && gid == 0) {
      angle = (double)rate * (64 * WARPS);
      angle -= 6.283185307179586 * rint(angle * 0.15915494309189535);
      sincosf((float)angle, &s, &c);
      steps[i * 4 + tig] = make_float2(c, s);
    }
  }
  __syncthreads();

  const u8* rows = codes + ((long long)b * sets + set) * tokens * RB;
  const u8* exponents = exponents_of + ((long long)b * sets + set) * tokens;
  const u32 ring_at = (u32)__cvta_generic_to_shared(ring);
  const int most = tokens - 1;
  constexpr int COPIES = (ROWS * CHUNKS + 31) / 32, PER = 64 / ROWS;
  auto fetch = [&](int chunk, int piece_of_chunk, int slot) {
    if (chunk < end) {
      const int base = 64 * chunk + ROWS * piece_of_chunk;
#pragma unroll
      for (int r = 0; r < COPIES; r++) {
        const int index = lane + 32 * r, token = index / CHUNKS, piece = index % CHUNKS;
        if ((ROWS * CHUNKS) % 32 == 0 || index < ROWS * CHUNKS)
          asm volatile(
              "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ring_at + slot * SLOT + token * SROW + piece * 16),
              "l"(rows + (u32)(min(base + token, most)) * (unsigned long long)RB + piece * 16));
      }
    }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(begin + (i / PER) * WARPS, i % PER, i);

  float acc[NB * F][4], sums[2][4], total0 = 0.f, total1 = 0.f, top0 = -1e30f, top1 = -1e30f;
#pragma unroll
  for (int i = 0; i < NB * F; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
#pragma unroll
  for (int i = 0; i < 2; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
  const u32 place =
      ring_at + (u32)((lane & 7) + ((lane >> 3) & 1) * 8) * SROW + (lane >> 4) * 16;  // rows of A: tokens
  const u32 place_t =
      ring_at + (u32)((lane & 7) + (lane >> 4) * 8) * SROW + ((lane >> 3) & 1) * 16;  // rows of A: units
  const u32 ONES = 0x3c003c00;
  const uint2* mykeys = skeys + tig;
  const float4* mystart = sstart + tig;
  const uint2* mine_all = sall + gid;
  const uint2* mymaps = smaps + lane;
  int slot = 0;
  u32 ahead[2];  // exponents of the next chunk, and whether a mask hides its tokens
  auto look = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = min(64 * chunk + 32 * i + lane, most);
      ahead[i] = exponents[at];
#if MASKED
      if (!seen[b * seen_stride + at]) ahead[i] |= 256;
#endif
    }
  };
  look(begin);

  for (int chunk = begin; chunk < end; chunk += WARPS) {
    float sk_lane[2], sv_lane[2];
    u32 bits[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = 64 * chunk + 32 * i + lane;
      sk_lane[i] = scale_of(ahead[i] & 15);
      sv_lane[i] = scale_of((ahead[i] >> 4) & 15);
      bits[i] = __ballot_sync(0xffffffffu, t >= first && t < last && !(ahead[i] >> 8));
    }
    look(chunk + WARPS);
    u32 qa[KS][2], qb[KS][2], ma[KS][2], mb[KS][2];
#pragma unroll
    for (int kk = 0; kk < KS; kk++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = kk * 4 + h * 2;
        float4 x = asked[i * 32 + lane], y = asked[(i + 1) * 32 + lane];
        qa[kk][h] = pack(x.x, y.x);
        qb[kk][h] = pack(x.y, y.y);
        ma[kk][h] = pack(x.z, y.z);
        mb[kk][h] = pack(x.w, y.w);
        const float2 u = steps[i * 4 + tig], v = steps[(i + 1) * 4 + tig];
        asked[i * 32 + lane] =
            make_float4(x.x * u.x + x.y * u.y, x.y * u.x - x.x * u.y, x.z * u.x + x.w * u.y, x.w * u.x - x.z * u.y);
        asked[(i + 1) * 32 + lane] =
            make_float4(y.x * v.x + y.y * v.y, y.y * v.x - y.x * v.y, y.z * v.x + y.w * v.y, y.w * v.x - y.z * v.y);
      }
    }
#pragma unroll
    for (int m = 0; m < PER; m++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncwarp();
      {
        const int later = m + STAGES - 1, next = slot == 0 ? STAGES - 1 : slot - 1;
        fetch(chunk + (later / PER) * WARPS, later % PER, next);
      }
      const u32 tile = place + slot * SLOT, tile_t = place_t + slot * SLOT;
      slot = slot == STAGES - 1 ? 0 : slot + 1;
      u32 x[MT][FRAGS][4];
#pragma unroll
      for (int i = 0; i < NB; i++) {
#pragma unroll
        for (int j = 0; j < MT; j++) {
          u32 w[4], hi[4];
          ldsm(w, tile + i * 32 + j * 16 * SROW);
#pragma unroll
          for (int r = 0; r < 4; r++) hi[r] = w[r] >> 6;
#pragma unroll
          for (int f = 0; f < FK; f++) {
            const uint2 mk = mykeys[(i * FK + f) * 4];
            const u32* from = f < (FK + 1) / 2 ? w : hi;  // the first half of the fields lies in the low bits
            x[j][i * FK + f][0] = number(from[0], mk.x);
            x[j][i * FK + f][1] = number(from[1], mk.x);
            x[j][i * FK + f][2] = number(from[2], mk.y);
            x[j][i * FK + f][3] = number(from[3], mk.y);
          }
        }
      }
      float s[MT][4], t[MT][4];
#pragma unroll
      for (int kk = 0; kk < KS; kk++) {
        u32 a[MT][4], c[MT][4], cs[MT][4], sn[MT][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int n = 2 * kk + h;
          float k1[MT][4], k2[MT][4];
          const float4 z1 = mystart[n * 4], z2 = mystart[(NT + n) * 4];
#pragma unroll
          for (int f = 0; f < FRAGS; f++) {
            const uint2 d1 = mymaps[(f * 2 * NT + n) * 32], d2 = mymaps[(f * 2 * NT + NT + n) * 32];
#pragma unroll
            for (int j = 0; j < MT; j++) {
              if (f == 0) {
                mma0(k1[j], x[j][f][0], x[j][f][1], x[j][f][2], x[j][f][3], d1.x, d1.y, z1);
                mma0(k2[j], x[j][f][0], x[j][f][1], x[j][f][2], x[j][f][3], d2.x, d2.y, z2);
              } else {
                mma(k1[j], x[j][f][0], x[j][f][1], x[j][f][2], x[j][f][3], d1.x, d1.y);
                mma(k2[j], x[j][f][0], x[j][f][1], x[j][f][2], x[j][f][3], d2.x, d2.y);
              }
            }
          }
#pragma unroll
          for (int j = 0; j < MT; j++) {
            const uint4 turn = turns[((m * MT + j) * NT + n) * 32 + lane];  // cos of both rows, sin of both rows
            const u32 y1 = pack(k1[j][0], k1[j][1]), w1 = pack(k1[j][2], k1[j][3]), y2 = pack(k2[j][0], k2[j][1]),
                      w2 = pack(k2[j][2], k2[j][3]);
            a[j][2 * h] = hfma(y1, turn.x, hneg(hmul(y2, turn.z)));
            a[j][2 * h + 1] = hfma(w1, turn.y, hneg(hmul(w2, turn.w)));
            c[j][2 * h] = hfma(y2, turn.x, hmul(y1, turn.z));
            c[j][2 * h + 1] = hfma(w2, turn.y, hmul(w1, turn.w));
            cs[j][2 * h] = turn.x;
            cs[j][2 * h + 1] = turn.y;
            sn[j][2 * h] = turn.z;
            sn[j][2 * h + 1] = turn.w;
          }
        }
#pragma unroll
        for (int j = 0; j < MT; j++) {
          if (kk == 0) {
            mma0(s[j], a[j][0], a[j][1], a[j][2], a[j][3], qa[kk][0], qa[kk][1]);
            mma0(t[j], cs[j][0], cs[j][1], cs[j][2], cs[j][3], ma[kk][0], ma[kk][1]);
          } else {
            mma(s[j], a[j][0], a[j][1], a[j][2], a[j][3], qa[kk][0], qa[kk][1]);
            mma(t[j], cs[j][0], cs[j][1], cs[j][2], cs[j][3], ma[kk][0], ma[kk][1]);
          }
          mma(s[j], c[j][0], c[j][1], c[j][2], c[j][3], qb[kk][0], qb[kk][1]);
          mma(t[j], sn[j][0], sn[j][1], sn[j][2], sn[j][3], mb[kk][0], mb[kk][1]);
        }
      }
      float ska[MT], skb[MT], sva[MT], svb[MT];
      bool grows = false;
#pragma unroll
      for (int j = 0; j < MT; j++) {
        const int tile16 = m * MT + j, from = ((tile16 & 1) << 4) + gid, half = tile16 >> 1;
        ska[j] = __shfl_sync(0xffffffffu, sk_lane[half], from);
        skb[j] = __shfl_sync(0xffffffffu, sk_lane[half], from + 8);
        sva[j] = __shfl_sync(0xffffffffu, sv_lane[half], from);
        svb[j] = __shfl_sync(0xffffffffu, sv_lane[half], from + 8);
        s[j][0] = s[j][0] * ska[j] + t[j][0] * 64.f;
        s[j][1] = s[j][1] * ska[j] + t[j][1] * 64.f;
        s[j][2] = s[j][2] * skb[j] + t[j][2] * 64.f;
        s[j][3] = s[j][3] * skb[j] + t[j][3] * 64.f;
        if (bits[half] != 0xffffffffu) {
          if (!((bits[half] >> from) & 1)) s[j][0] = s[j][1] = -1.f / 0.f;
          if (!((bits[half] >> (from + 8)) & 1)) s[j][2] = s[j][3] = -1.f / 0.f;
        }
        grows = grows || fmaxf(s[j][0], s[j][2]) > top0 + 6.f || fmaxf(s[j][1], s[j][3]) > top1 + 6.f;
      }
      if (__any_sync(0xffffffffu, grows)) {
        float n0 = top0, n1 = top1;
#pragma unroll
        for (int j = 0; j < MT; j++) {
          n0 = fmaxf(n0, fmaxf(s[j][0], s[j][2]));
          n1 = fmaxf(n1, fmaxf(s[j][1], s[j][3]));
        }
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) {
          n0 = fmaxf(n0, __shfl_xor_sync(0xffffffffu, n0, o));
          n1 = fmaxf(n1, __shfl_xor_sync(0xffffffffu, n1, o));
        }
        const float w0 = ex2(top0 - n0), w1 = ex2(top1 - n1);
        top0 = n0;
        top1 = n1;
        total0 *= w0;
        total1 *= w1;
#pragma unroll
        for (int i = 0; i < NB * F; i++) {
          acc[i][0] *= w0;
          acc[i][1] *= w1;
          acc[i][2] *= w0;
          acc[i][3] *= w1;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          sums[i][0] *= w0;
          sums[i][1] *= w1;
          sums[i][2] *= w0;
          sums[i][3] *= w1;
        }
      }
      u32 k0[MT], k1[MT], v0[MT], v1[MT];
#pragma unroll
      for (int j = 0; j < MT; j++) {
        const float p0 = ex2(s[j][0] - top0), p1 = ex2(s[j][1] - top1), p2 = ex2(s[j][2] - top0),
                    p3 = ex2(s[j][3] - top1);
        total0 += p0 + p2;
        total1 += p1 + p3;
        k0[j] = turned(pack(p0 * ska[j], p1 * ska[j]));
        k1[j] = turned(pack(p2 * skb[j], p3 * skb[j]));
        mma(sums[0], ONES, ONES, ONES, ONES, k0[j], k1[j]);
        if (FV) {
          v0[j] = turned(pack(p0 * sva[j], p1 * sva[j]));
          v1[j] = turned(pack(p2 * svb[j], p3 * svb[j]));
          mma(sums[1], ONES, ONES, ONES, ONES, v0[j], v1[j]);
        }
      }
#pragma unroll
      for (int i = 0; i < NB; i++) {
#pragma unroll
        for (int j = 0; j < MT; j++) {
          u32 w[4], hi[4];
          ldsmt(w, tile_t + i * 32 + j * 16 * SROW);
#pragma unroll
          for (int r = 0; r < 4; r++) hi[r] = w[r] >> 6;
#pragma unroll
          for (int f = 0; f < F; f++) {
            const uint2 mk = mine_all[(i * F + f) * 8];
            const bool is_key = f < FK;
            const u32* from = (is_key ? f < (FK + 1) / 2 : f - FK < FV / 2) ? w : hi;
            mma(acc[i * F + f], number(from[0], mk.x), number(from[1], mk.y), number(from[2], mk.x),
                number(from[3], mk.y), is_key ? k0[j] : v0[j], is_key ? k1[j] : v1[j]);
          }
        }
      }
    }
  }
  asm volatile("cp.async.wait_all;");
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) {
    total0 += __shfl_xor_sync(0xffffffffu, total0, o);
    total1 += __shfl_xor_sync(0xffffffffu, total1, o);
  }
  const int parts = gridDim.x * WARPS, mine = part * WARPS + warp;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int n = 2 * tig + j;
    if (n < asked_here) {
      const long long row = ((long long)b * heads + asks + n) * parts + mine;
      float* to = out + row * (NB * F * 16);
#pragma unroll
      for (int i = 0; i < NB * F; i++) {
        to[i * 16 + gid] = acc[i][j];
        to[i * 16 + gid + 8] = acc[i][2 + j];
      }
      if (gid == 0)
        *(float4*)(logs + row * 4) = make_float4(j ? top1 : top0, j ? total1 : total0, sums[0][j], sums[1][j]);
    }
  }
}

// What all parts have gathered, with the tokens that are not coded: the first of a sequence, and the current one.
extern "C" __global__ void __launch_bounds__(128)
    join(const float* gathered, const float* logs, const float* offsets, const float* values_of,
         const float* value_mean, const number_t* q, const number_t* first_keys, const number_t* first_values,
         const number_t* key, const number_t* value, const u8* seen, number_t* out, const int* high,
         const int* starts, double scaling, int parts, int first, int key_heads, int set_heads,
         int seen_stride) {
  extern __shared__ float numbers[];  // SLOTS, then scores of exact tokens
  float* exact = numbers + SLOTS;
  __shared__ float weights[4], most;
  const int h = blockIdx.x, b = blockIdx.y, g = h / G, set = g / set_heads, heads = key_heads * G,
            lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long row = (long long)b * heads + h;
  const int last = *high, start = starts[b];
  for (int e = warp; e <= first; e += 4) {  // the last one is the current token
    const int at = start + e;
    const bool there = e == first || (at >= 0 && at < last);
    bool visible = there;
#if MASKED
    visible = there && seen[b * seen_stride + (e == first ? last : at)] != 0;
#endif
    float dot = 0.f;
    if (visible) {
      const number_t* keys = e == first ? key + ((long long)b * key_heads + g) * D
                                        : first_keys + (((long long)b * key_heads + g) * first + e) * D;
      for (int i = lane; i < D; i += 32) dot += load(q, row * D + i) * load(keys, i);
    }
    for (int o = 16; o; o >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, o);
    if (lane == 0) exact[e] = visible ? dot * (float)scaling : -1e30f;
  }
  __syncthreads();
  if (warp == 0) {
    float top = -1e30f;
    for (int i = lane; i < parts; i += 32) top = fmaxf(top, logs[(row * parts + i) * 4]);
    for (int i = lane; i <= first; i += 32) top = fmaxf(top, exact[i]);
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    float sums[3] = {0.f, 0.f, 0.f}, alone = 0.f;
    for (int i = lane; i < parts; i += 32) {
      const float w = ex2(logs[(row * parts + i) * 4] - top);
      for (int j = 0; j < 3; j++) sums[j] += w * logs[(row * parts + i) * 4 + 1 + j];
    }
    for (int i = lane; i <= first; i += 32) {
      const float w = ex2(exact[i] - top);
      exact[i] = w;
      alone += w;
    }
    for (int o = 16; o; o >>= 1) {
      for (int j = 0; j < 3; j++) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], o);
      alone += __shfl_xor_sync(0xffffffffu, alone, o);
    }
    if (lane == 0) {
      most = top;
      weights[0] = sums[0];
      weights[1] = sums[1];
      weights[2] = sums[2];
      weights[3] = alone;
    }
  }
  __syncthreads();
  for (int s = threadIdx.x; s < SLOTS; s += 128) {
    float sum = 0.f;
    for (int i = 0; i < parts; i++)
      sum += ex2(logs[(row * parts + i) * 4] - most) * gathered[(row * parts + i) * SLOTS + s];
    numbers[s] = sum - offsets[set * SLOTS + s] * ((s / 16) % F < FK ? weights[1] : weights[2]);
  }
  __syncthreads();
  const float total = weights[0] + weights[3];
  for (int j = threadIdx.x; j < DV; j += 128) {
    float sum = weights[0] * value_mean[g * DV + j];
    const float* own = values_of + (long long)g * SLOTS * DV + j;
#pragma unroll 8
    for (int s = 0; s < SLOTS; s++) sum += numbers[s] * own[(long long)s * DV];
    for (int e = 0; e < first; e++)
      if (exact[e] > 0.f)
        sum += exact[e] * load(first_values, (((long long)b * key_heads + g) * first + e) * DV + j);
    sum += exact[first] * load(value, ((long long)b * key_heads + g) * DV + j);
    keep(out, row * DV + j, sum / total);
  }
}

// One new token: its row of units and its exponents, for every set of heads.
extern "C" __global__ void __launch_bounds__(128)
    encode(const number_t* key, const number_t* value, const long long* positions, const int* order,
           const float* rates, const float* key_mean, const float* value_mean, const float* key_encode,
           const float* predict, const float* value_encode, const float* levels, const int* offsets, u16* rows,
           u8* exponents, int pairs, int key_heads, int set_heads) {
  extern __shared__ float numbers[];
  const int set = blockIdx.x, b = blockIdx.y, sets = gridDim.x, n_keys = set_heads * D, n_values = set_heads * DV;
  const int inputs = FV ? n_keys : n_keys + n_values;
  float* x = numbers;                // keys, then values
  float* z = x + n_keys + n_values;  // codes of all slots
  __shared__ float part[4];
  const double position = (double)positions[b];
  for (int j = threadIdx.x; j < n_keys; j += 128) {
    const int head = set * set_heads + j / D, p = j % D;
    const long long own = ((long long)b * key_heads + head) * D;
    float k = load(key, own + order[p]);
    if (p < 2 * pairs) {
      const int pair = p % pairs;
      double angle = (double)rates[pair] * position;
      angle -= 6.283185307179586 * rint(angle * 0.15915494309189535);
      float s, c;
      sincosf((float)angle, &s, &c);
      const float other = load(key, own + order[p < pairs ? p + pairs : p - pairs]);
      k = p < pairs ? k * c + other * s : k * c - other * s;
    }
    x[j] = k - key_mean[set * n_keys + j];
  }
  for (int j = threadIdx.x; j < n_values; j += 128) {
    const int head = set * set_heads + j / DV;
    x[n_keys + j] = load(value, ((long long)b * key_heads + head) * DV + j % DV) - value_mean[set * n_values + j];
  }
  __syncthreads();
  u32 both = 0;
  for (int stage = 0; stage < (FV ? 2 : 1); stage++) {
    const int slots = NU * (stage ? FV : FK), n = stage ? n_values : inputs, before = stage ? NU * FK : 0;
    const float* in = stage ? x + n_keys : x;
    const float* encode =
        stage ? value_encode + (long long)set * n * slots : key_encode + (long long)set * n * slots;
    const float* level = levels + (long long)set * NU * F + before;
    float* y = z + before;
    float largest = 1.f;
    for (int i = threadIdx.x; i < slots; i += 128) {
      float sum = 0.f;
#pragma unroll 8
      for (int j = 0; j < n; j++) sum += in[j] * encode[(long long)j * slots + i];
      y[i] = sum;
      if (level[i] > 2.f) largest = fmaxf(largest, isnan(sum) ? 1.f / 0.f : fabsf(sum) * 2.f / level[i]);
    }
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = largest;
    __syncthreads();
    largest = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    const u32 e = (u32)fminf(ceilf(sqrtf(log2f(largest) * 32.f)), 15.f);
    both |= e << (4 * stage);
    const float scale = exp2f((float)(e * e) * 0.03125f);
    for (int i = threadIdx.x; i < slots; i += 128) {
      const float code = fminf(fmaxf(floorf(y[i] / scale + level[i] * 0.5f), 0.f), level[i] - 1.f);
      y[i] = stage ? code : (code - (level[i] - 1.f) * 0.5f) * scale;
    }
    __syncthreads();
    if (!stage) {
      if (FV) {
        for (int j = threadIdx.x; j < n_values; j += 128) {
          float sum = 0.f;
#pragma unroll 8
          for (int i = 0; i < slots; i++) sum += z[i] * predict[((long long)set * slots + i) * n_values + j];
          x[n_keys + j] -= sum;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < slots; i += 128) z[i] = rintf(z[i] / scale + (level[i] - 1.f) * 0.5f);
      __syncthreads();
    }
  }
  const long long row = (long long)b * sets + set;
  for (int u = threadIdx.x; u < NU; u += 128) {
    u32 unit = 0;
    for (int f = 0; f < F; f++) unit |= (u32)z[f * NU + u] << offsets[((long long)set * F + f) * NU + u];
    rows[row * NU + u] = (u16)unit;
  }
  if (threadIdx.x == 0) exponents[row] = (u8)both;
}
"""
