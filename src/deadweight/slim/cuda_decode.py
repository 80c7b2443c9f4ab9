"""The CUDA source of the kernel that decodes; `kernels.py` says what it does."""

DECODE = r"""
#define KA (D2 / 16)  // groups of 16 rotary pairs
#define KL (KA - KF)  // those that turn slowly; the KF groups before them turn fast
#define NT (D2 / 8)
#define CH (2 * SUB)     // tokens of a chunk
#define BIG (SPAN * CH)  // tokens of the chunks for which the query is turned once
#define PART_ROWS (16 * MT)
#define SLOT (PART_ROWS * SROW + 32)
#define TILES (BIG / (16 * MT))  // of the table
#define IS_FAST(fr) ((FAST_FRAGMENTS >> (fr)) & 1)
#define IS_SLOW(fr) ((SLOW_FRAGMENTS >> (fr)) & 1)
#define FAST_MAPS (N_FAST * 2 * KF * 32)  // uint4
#define SLOW_MAPS (N_SLOW * 2 * KL * 32)
// Codes as float16 are code · 2⁻²⁴: the bits of a code alone, which is a subnormal number. Where no fragment makes keys
// of both kinds, those of slow pairs are 1024 + code instead.
#define APART ((FAST_FRAGMENTS & SLOW_FRAGMENTS) == 0)
#define OFFSET (APART ? 0x64006400u : 0u)

// The bytes of shared memory that `decode` takes; `kernel_sizes.py` counts the same.
struct Shared {
  uint4 table[TILES * KA * 2 * 32];
  uint4 fast[FAST_MAPS + 1];
  uint4 slow[SLOW_MAPS + 1];
  float4 turns[D2];  // from the last chunks of a warp to its next ones, and by half a chunk
  float2 scale_of_byte[256];
  uint2 key_masks[FRAGS * 4];
  uint2 all_masks[NB * F * 8];
  uint2 starts[4 * KF * 4 + 1];
  struct Warp {
    float4 query[KA * 4 * 32];
    float2 scales[CH];
    u32 visible[CH / 32];
    __align__(16) u8 ring[STAGES * SLOT];
  } warps[WARPS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "kernel_sizes.py counts fewer bytes");
static_assert(SUB % (PART_ROWS * STAGES) == 0, "half a chunk ends with the last slot of the ring");

__device__ __forceinline__ void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ float2 angle_of(float rate, double tokens) {
  double angle = (double)rate * tokens;
  angle -= 6.283185307179586 * rint(angle * 0.15915494309189535);
  float s, c;
  __sincosf((float)angle, &s, &c);
  return make_float2(c, s);
}
// A score from its slow and its fast pairs, whose keys are 2⁻⁹ of what they should be.
__device__ __forceinline__ float joined(float slow, float fast) {
  return APART ? slow + 512.f * fast : 0x1p24f * (slow + 0x1p-15f * fast);
}
__device__ __forceinline__ float2 turned_back(float2 x, float2 by) {
  return make_float2(x.x * by.x + x.y * by.y, x.y * by.x - x.x * by.y);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    decode(const number_t* q, const u8* codes, const u8* exponents_of, const u8* seen, const uint2* key_masks,
           const uint2* all_masks, const uint4* fast_maps, const uint4* slow_maps, const uint2* starts,
           const float* mean, const float* gains, const float* rates, const float4* turns, const float4* slow_terms,
           const int* places, const uint4* table, float* out, float4* logs, const long long* begins_at,
           const long long* high, const long long* origins, double scaling, int tokens, int key_heads, int set_heads,
           int seen_stride, int uncoded) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& shared = *(Shared*)memory;
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile: it is not to be read again in the loop
  const int warp = threadIdx.x >> 5, gid = lane >> 2, tig = lane & 3;
  Shared::Warp& own = shared.warps[warp];
  const int part = blockIdx.x, g = blockIdx.y / TURNS, b = blockIdx.z, set = g / set_heads,
            sets = key_heads / set_heads;
  const int asks = g * G + (blockIdx.y % TURNS) * GQ, asked_here = min(GQ, G - (int)(blockIdx.y % TURNS) * GQ),
            heads = key_heads * G;
  for (int i = threadIdx.x; i < FAST_MAPS; i += 32 * WARPS) shared.fast[i] = fast_maps[g * FAST_MAPS + i];
  for (int i = threadIdx.x; i < SLOW_MAPS; i += 32 * WARPS) shared.slow[i] = slow_maps[g * SLOW_MAPS + i];
  for (int i = threadIdx.x; i < FRAGS * 4; i += 32 * WARPS) shared.key_masks[i] = key_masks[set * FRAGS * 4 + i];
  for (int i = threadIdx.x; i < TILES * KA * 2 * 32; i += 32 * WARPS) shared.table[i] = table[i];
  for (int i = threadIdx.x; i < 256; i += 32 * WARPS)
    shared.scale_of_byte[i] = make_float2(scale_of(i & 15), scale_of(i >> 4));
  for (int i = threadIdx.x; i < D2; i += 32 * WARPS) shared.turns[i] = turns[i];
  for (int i = threadIdx.x; i < 4 * KF * 4; i += 32 * WARPS) shared.starts[i] = starts[g * (4 * KF * 4) + i];
  for (int i = threadIdx.x; i < NB * F * 8; i += 32 * WARPS) shared.all_masks[i] = all_masks[set * NB * F * 8 + i];

  const int first = max((int)begins_at[b] + uncoded, 0), last = (int)*high, origin = (int)origins[b];
  const int c0 = first / BIG, c1 = (last + BIG - 1) / BIG;
  const int each = (c1 - c0 + gridDim.x - 1) / gridDim.x;
  const int begin = c0 + part * each + warp, end = min(c0 + (part + 1) * each, c1);

  // Columns 2j and 2j + 1 of a product with queries belong to query j. For slow pairs the second has what the score
  // grows by with every token. For fast pairs, and for the mean, it has the query as the second of two tiles needs
  // it, 16 tokens later. In `query`, lane (column, i) has four pairs of each group, and what the mean adds.
#pragma unroll
  for (int i = 0; i < KA * 4; i++) {
    const int p = 16 * (i >> 2) + 2 * tig + (i & 1) + 8 * ((i & 3) >> 1);
    const bool slow = i >= KF * 4, second = gid & 1;
    float2 x = make_float2(0.f, 0.f), m = x;
    if (gid / 2 < asked_here) {
      const long long at = ((long long)b * heads + asks + gid / 2) * D;
      const float factor = (float)scaling * gains[g];
      if (places[p] >= 0) x.x = load(q, at + places[p]) * factor;
      if (places[D2 + p] >= 0) x.y = load(q, at + places[D2 + p]) * factor;
      const double begins = (double)BIG * begin - origin;
      const float2 here = turned_back(x, angle_of(rates[p], begins + (second ? 16 : 0)));
      const float m1 = mean[g * 2 * D2 + p] * 0.015625f, m2 = mean[g * 2 * D2 + D2 + p] * 0.015625f;
      m = make_float2(here.x * m1 + here.y * m2, here.y * m1 - here.x * m2);
      if (slow) {
        const float4 term = slow_terms[p];
        x = turned_back(turned_back(x, angle_of(rates[p], begins)), make_float2(term.x, term.y));
        x = second ? make_float2(x.y * term.w, -x.x * term.w) : make_float2(x.x * term.z, x.y * term.z);
      } else
        x = here;
    }
    own.query[i * 32 + lane] = make_float4(x.x, x.y, m.x, m.y);
  }
  __syncthreads();

  const u8* rows = codes + ((long long)b * sets + set) * tokens * RB;
  const u8* exponents = exponents_of + ((long long)b * sets + set) * tokens;
  const u32 ring_at = (u32)__cvta_generic_to_shared(own.ring);
  const int most = tokens - 1;
  constexpr int PIECES = PART_ROWS * CHUNKS, COPIES = (PIECES + 31) / 32, PER = CH / PART_ROWS;
  const u32 to_here = ring_at + (lane / CHUNKS) * SROW + (lane % CHUNKS) * 16;
  const u8* from_here = rows + lane * 16;
  asm volatile("" : "+l"(from_here));  // one register pair, not a sum that is computed again
  const int limit = BIG * end, plain_limit = min(limit, tokens) - PART_ROWS;
  int base = BIG * begin;  // of the next piece
  auto fetch = [&](int slot) {
    if (base <= plain_limit) {
      const u8* from = from_here + (u64)(u32)base * RB;
      const u32 to = to_here + slot * SLOT;
#pragma unroll
      for (int r = 0; r < COPIES; r++) {
        const int index = lane + 32 * r;
        const u32 at = 32 % CHUNKS == 0 ? to + r * (32 / CHUNKS) * SROW
                                        : ring_at + slot * SLOT + (index / CHUNKS) * SROW + (index % CHUNKS) * 16;
        if (PIECES % 32 == 0 || index < PIECES) copy16(at, from + 512 * r);
      }
    } else if (base < limit) {  // rows behind the last one are never seen: any row will do
#pragma unroll 1
      for (int index = lane; index < PIECES; index += 32)
        copy16(ring_at + slot * SLOT + (index / CHUNKS) * SROW + (index % CHUNKS) * 16,
               rows + (u64)(u32)min(base + index / CHUNKS, most) * RB + (index % CHUNKS) * 16);
    }
    asm volatile("cp.async.commit_group;");
    base += PART_ROWS;
    if (base % BIG == 0) base += (WARPS - 1) * BIG;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);

  float acc[NB * F][4], sums[4] = {0.f, 0.f, 0.f, 0.f}, total = 0.f, top = -1e30f;
#pragma unroll
  for (int i = 0; i < NB * F; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
  const u32 place =
      ring_at + (u32)((lane & 7) + ((lane >> 3) & 1) * 8) * SROW + (lane >> 4) * 16;  // rows of A: tokens
  const u32 place_t =
      ring_at + (u32)((lane & 7) + (lane >> 4) * 8) * SROW + ((lane >> 3) & 1) * 16;  // rows of A: units
  const u32 ONES = 0x3c003c00;
  // What every tile reads again, in registers where there are enough of them.
  uint2 own_masks[KEEP ? FRAGS : 1], own_all[KEEP ? NB * F : 1], own_starts[KEEP ? 4 * KF + 1 : 1];
  uint4 own_maps[KEEP_MAPS ? N_FAST * 2 * KF + 1 : 1];
#pragma unroll
  for (int i = 0; i < KEEP * FRAGS; i++) own_masks[i] = shared.key_masks[i * 4 + tig];
#pragma unroll
  for (int i = 0; i < KEEP * NB * F; i++) own_all[i] = shared.all_masks[i * 8 + gid];
#pragma unroll
  for (int i = 0; i < KEEP * 4 * KF; i++) own_starts[i] = shared.starts[i * 4 + tig];
#pragma unroll
  for (int i = 0; i < KEEP_MAPS * N_FAST * 2 * KF; i++) own_maps[i] = shared.fast[i * 32 + lane];
  auto key_mask = [&](int i) { return KEEP ? own_masks[KEEP * i] : shared.key_masks[i * 4 + tig]; };
  auto any_mask = [&](int i) { return KEEP ? own_all[KEEP * i] : shared.all_masks[i * 8 + gid]; };
  auto start_of = [&](int i) { return KEEP ? own_starts[KEEP * i] : shared.starts[i * 4 + tig]; };
  auto fast_map = [&](int i) { return KEEP_MAPS ? own_maps[KEEP_MAPS * i] : shared.fast[i * 32 + lane]; };
  u32 ahead[CH / 32], shown[CH / 32];  // exponents of the next chunk, and what the mask says of it
  auto look = [&](int chunk) {  // nothing is waited for here
#pragma unroll
    for (int i = 0; i < CH / 32; i++) {
      const int at = min(CH * chunk + 32 * i + lane, most);
      asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(ahead[i]) : "l"(exponents + at));
#if MASKED
      asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(shown[i]) : "l"(seen + (long long)b * seen_stride + at));
#endif
    }
  };
  look(begin * SPAN);

#pragma unroll 1
  for (int big = begin; big < end; big += WARPS) {
    // Queries at the start of these chunks, as operands; then as the next chunks of this warp need them.
    u32 qa[KF + 1][2], qb[KF + 1][2], ma[KA][2], mb[KA][2];
    float constant[2] = {0.f, 0.f};
#pragma unroll
    for (int k = 0; k < KA; k++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = k * 4 + h * 2;
        float4 x = own.query[i * 32 + lane], y = own.query[(i + 1) * 32 + lane];
        const float4 u = shared.turns[16 * k + 8 * h + 2 * tig], v = shared.turns[16 * k + 8 * h + 2 * tig + 1];
        const float2 by_u = make_float2(u.x, u.y), by_v = make_float2(v.x, v.y);
        ma[k][h] = pack(x.z, y.z);
        mb[k][h] = pack(x.w, y.w);
        constant[0] += x.z + y.z;
        if (k < KF) {
          qa[k][h] = pack(x.x, y.x);
          qb[k][h] = pack(x.y, y.y);
          const float2 a = turned_back(make_float2(x.x, x.y), by_u), c = turned_back(make_float2(y.x, y.y), by_v);
          x.x = a.x;
          x.y = a.y;
          y.x = c.x;
          y.y = c.y;
        }
        const float2 a = turned_back(make_float2(x.z, x.w), by_u), c = turned_back(make_float2(y.z, y.w), by_v);
        own.query[i * 32 + lane] = make_float4(x.x, x.y, a.x, a.y);
        own.query[(i + 1) * 32 + lane] = make_float4(y.x, y.y, c.x, c.y);
      }
    }
    constant[0] += __shfl_xor_sync(0xffffffffu, constant[0], 1);
    constant[0] += __shfl_xor_sync(0xffffffffu, constant[0], 2);
    constant[1] = 64.f * __shfl_sync(0xffffffffu, constant[0], 8 * tig + 4);
    constant[0] = 64.f * __shfl_sync(0xffffffffu, constant[0], 8 * tig);

#pragma unroll 1
    for (int span = 0; span < SPAN; span++) {
      const int chunk = big * SPAN + span;
      u32 all = 0xffffffffu;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < CH / 32; i++) own.scales[32 * i + lane] = shared.scale_of_byte[ahead[i]];
      if (MASKED || CH * chunk < first || CH * (chunk + 1) > last) {
#pragma unroll
        for (int i = 0; i < CH / 32; i++) {
          const int t = CH * chunk + 32 * i + lane;
          bool here = t >= first && t < last;
#if MASKED
          here = here && shown[i];
#endif
          const u32 visible = __ballot_sync(0xffffffffu, here);
          own.visible[i] = visible;
          all &= visible;
        }
      }
      look(span + 1 < SPAN ? chunk + 1 : (big + WARPS) * SPAN);

      u32 slow_q[2][N_SLOW + 1][2], near1[KL + 1][4], near2[KL + 1][4];
      float base[2][4];
#pragma unroll
      for (int k = KF; k < KA; k++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int i = k * 4 + h * 2;
          float2* at = (float2*)(own.query + i * 32 + lane);
          const float2 x = at[0], y = at[64];
          const float4 u = shared.turns[16 * k + 8 * h + 2 * tig], v = shared.turns[16 * k + 8 * h + 2 * tig + 1];
          const float2 near_u = make_float2(u.z, u.w), near_v = make_float2(v.z, v.w), x2 = turned_back(x, near_u),
                       y2 = turned_back(y, near_v);
          near1[k - KF][2 * h] = pack(x.x, y.x);
          near1[k - KF][2 * h + 1] = pack(x2.x, y2.x);
          near2[k - KF][2 * h] = pack(x.y, y.y);
          near2[k - KF][2 * h + 1] = pack(x2.y, y2.y);
          const bool last_span = span == SPAN - 1;
          at[0] = turned_back(x2, last_span ? make_float2(u.x, u.y) : near_u);
          at[64] = turned_back(y2, last_span ? make_float2(v.x, v.y) : near_v);
        }
      }
      // What the slow pairs of a query make of every code: the map, transposed, times the query.
#pragma unroll
      for (int fr = 0, f = 0; fr < FRAGS; fr++) {
        if (!IS_SLOW(fr)) continue;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
          for (int k = 0; k < KL; k++) {
            const uint4 w = shared.slow[((f * 2 + h) * KL + k) * 32 + lane];
            mma(c, near1[k][0], near1[k][1], near1[k][2], near1[k][3], w.x, w.y);
            mma(c, near2[k][0], near2[k][1], near2[k][2], near2[k][3], w.z, w.w);
          }
          slow_q[0][f][h] = pack(c[0], c[1]);
          slow_q[1][f][h] = pack(c[2], c[3]);
        }
        f++;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {  // the middle of a code is half of its mask
        float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int fr = 0, f = 0; fr < FRAGS; fr++) {
          if (!IS_SLOW(fr)) continue;
          const uint2 mk = key_mask(fr);
          mma(c, OFFSET, mk.x | OFFSET, OFFSET, mk.y | OFFSET, slow_q[half][f][0], slow_q[half][f][1]);
          f++;
        }
        base[half][0] = base[half][2] = -0.5f * (c[0] + c[2]);
        base[half][1] = base[half][3] = -0.5f * (c[1] + c[3]);
      }

#pragma unroll 1
      for (int half = 0; half < 2; half++) {
        if (half) {
#pragma unroll
          for (int f = 0; f < N_SLOW; f++) {
            slow_q[0][f][0] = slow_q[1][f][0];
            slow_q[0][f][1] = slow_q[1][f][1];
          }
#pragma unroll
          for (int i = 0; i < 4; i++) base[0][i] = base[1][i];
        }
        float away = gid - 0.5f * (SUB - 1);  // of a token, from the middle of its half of the chunk
#pragma unroll 1
        for (int pair = 0; pair < PER / 2; pair += STAGES)
#pragma unroll
        for (int slot = 0; slot < STAGES; slot++) {
          const int m = half * (PER / 2) + pair + slot;
          asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
          __syncwarp();
          fetch((slot + STAGES - 1) % STAGES);
          const u32 tile = place + slot * SLOT, tile_t = place_t + slot * SLOT;
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
                const uint2 mk = key_mask(i * FK + f);
                const u32* from = f < (FK + 1) / 2 ? w : hi;  // the first half of the fields lies in the low bits
                const u32 offset = IS_SLOW(i * FK + f) ? OFFSET : 0u;
                x[j][i * FK + f][0] = from[0] & mk.x | offset;
                x[j][i * FK + f][1] = from[1] & mk.x | offset;
                x[j][i * FK + f][2] = from[2] & mk.y | offset;
                x[j][i * FK + f][3] = from[3] & mk.y | offset;
              }
            }
          }
          float s[MT][4], r[MT][4],
              t[4] = {0.f, 0.f, 0.f, 0.f};  // scores of slow pairs, of fast ones, and of the mean
#pragma unroll
          for (int j = 0; j < MT; j++) {
            s[j][0] = base[0][0];
            s[j][1] = base[0][1];
            s[j][2] = base[0][2];
            s[j][3] = base[0][3];
            r[j][0] = r[j][1] = r[j][2] = r[j][3] = 0.f;
#pragma unroll
            for (int fr = 0, f = 0; fr < FRAGS; fr++) {
              if (!IS_SLOW(fr)) continue;
              mma(s[j], x[j][fr][0], x[j][fr][1], x[j][fr][2], x[j][fr][3], slow_q[0][f][0], slow_q[0][f][1]);
              f++;
            }
          }
#pragma unroll
          for (int k = 0; k < KA; k++) {
            u32 a[MT][4], c[MT][4], cs[4], sn[4];
            const uint4* turn = shared.table + (((span * PER + m) * KA + k) * 2) * 32 + lane;
            *(uint4*)cs = turn[0];  // cos − 1
            *(uint4*)sn = turn[32];
#pragma unroll
            for (int h = 0; h < 2 * (k < KF); h++) {
              const int n = 2 * k + h;
              u32 k1[MT][2], k2[MT][2];
              const uint2 z1 = start_of(2 * n), z2 = start_of(2 * n + 1);
#pragma unroll
              for (int j = 0; j < MT; j++) {
                k1[j][0] = z1.x;
                k1[j][1] = z1.y;
                k2[j][0] = z2.x;
                k2[j][1] = z2.y;
              }
#pragma unroll
              for (int fr = 0, f = 0; fr < FRAGS; fr++) {
                if (!IS_FAST(fr)) continue;
                const uint4 w = fast_map(f++ * 2 * KF + n);
#pragma unroll
                for (int j = 0; j < MT; j++) {
                  half_mma(k1[j], x[j][fr], w.x, w.y);
                  half_mma(k2[j], x[j][fr], w.z, w.w);
                }
              }
#pragma unroll
              for (int j = 0; j < MT; j++) {
                const u32 y1 = k1[j][0], w1 = k1[j][1], y2 = k2[j][0], w2 = k2[j][1];
                a[j][2 * h] = hfma(hneg(y2), sn[2 * h], hfma(y1, cs[2 * h], y1));
                a[j][2 * h + 1] = hfma(hneg(w2), sn[2 * h + 1], hfma(w1, cs[2 * h + 1], w1));
                c[j][2 * h] = hfma(y1, sn[2 * h], hfma(y2, cs[2 * h], y2));
                c[j][2 * h + 1] = hfma(w1, sn[2 * h + 1], hfma(w2, cs[2 * h + 1], w2));
              }
            }
            mma(t, cs[0], cs[1], cs[2], cs[3], ma[k][0], ma[k][1]);
            mma(t, sn[0], sn[1], sn[2], sn[3], mb[k][0], mb[k][1]);
#pragma unroll
            for (int j = 0; j < MT * (k < KF); j++) {
              mma(r[j], a[j][0], a[j][1], a[j][2], a[j][3], qa[k][0], qa[k][1]);
              mma(r[j], c[j][0], c[j][1], c[j][2], c[j][3], qb[k][0], qb[k][1]);
            }
          }
          float2 sa[MT], sb[MT];  // scales of keys and of values, of both rows
          bool grows = false;
#pragma unroll
          for (int j = 0; j < MT; j++) {
            const int tile16 = m * MT + j;
            sa[j] = own.scales[16 * tile16 + gid];
            sb[j] = own.scales[16 * tile16 + gid + 8];
            s[j][0] = joined(s[j][0] + away * s[j][1], r[j][j]) * sa[j].x + (t[j] * 64.f + constant[j]);
            s[j][2] = joined(s[j][2] + (away + 8.f) * s[j][3], r[j][2 + j]) * sb[j].x + (t[2 + j] * 64.f + constant[j]);
            away += 16.f;
            if (all != 0xffffffffu) {
              __syncwarp();  // a branch, not predicates: it is taken at the ends of a sequence only
              const u32 bits = own.visible[tile16 / 2];
              const int from = ((tile16 & 1) << 4) + gid;
              if (!((bits >> from) & 1)) s[j][0] = __int_as_float(0xff800000);
              if (!((bits >> (from + 8)) & 1)) s[j][2] = __int_as_float(0xff800000);
            }
            grows = grows || fmaxf(s[j][0], s[j][2]) > top + 6.f;
          }
          if (__any_sync(0xffffffffu, grows)) {
            float n = top;
#pragma unroll
            for (int j = 0; j < MT; j++) n = fmaxf(n, fmaxf(s[j][0], s[j][2]));
#pragma unroll
            for (int o = 4; o < 32; o <<= 1) n = fmaxf(n, __shfl_xor_sync(0xffffffffu, n, o));
            const float w = ex2(top - n);
            top = n;
            total *= w;
#pragma unroll
            for (int i = 0; i < NB * F; i++) {
              acc[i][0] *= w;
              acc[i][1] *= w;
              acc[i][2] *= w;
              acc[i][3] *= w;
            }
            sums[0] *= w;
            sums[1] *= w;
          }
          u32 p0[MT], p1[MT];  // weights times scales of keys and of values, in neighbouring columns
#pragma unroll
          for (int j = 0; j < MT; j++) {
            const float a = ex2(s[j][0] - top), c = ex2(s[j][2] - top);
            total += a + c;
            p0[j] = turned(pack(a * sa[j].x, a * sa[j].y));
            p1[j] = turned(pack(c * sb[j].x, c * sb[j].y));
            mma(sums, ONES, ONES, ONES, ONES, p0[j], p1[j]);
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
                const uint2 mk = any_mask(i * F + f);
                const u32* from = (f < FK ? f < (FK + 1) / 2 : f - FK < FV / 2) ? w : hi;
                mma(acc[i * F + f], from[0] & mk.x, from[1] & mk.y, from[2] & mk.x, from[3] & mk.y, p0[j], p1[j]);
              }
            }
          }
        }
      }
    }
  }
  asm volatile("cp.async.wait_all;");
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) total += __shfl_xor_sync(0xffffffffu, total, o);

  // The warps of a program add up what they have: one row of `out` for each query and program.
  __syncthreads();
  float4* each_log = (float4*)memory;                // warps × 4
  float* gathered = (float*)(each_log + WARPS * 4);  // warps × 4 × SLOTS
  if (gid == 0) each_log[warp * 4 + tig] = make_float4(top, total, sums[0], sums[1]);
#pragma unroll
  for (int i = 0; i < NB * F; i++) {
    const bool is_key = i % F < FK;
    float* to = gathered + (warp * 4 + tig) * SLOTS + i * 16 + gid;
    to[0] = 0x1p24f * (is_key ? acc[i][0] : acc[i][1]);
    to[8] = 0x1p24f * (is_key ? acc[i][2] : acc[i][3]);
  }
  __syncthreads();
  const int parts = gridDim.x;
  for (int n = 0; n < asked_here; n++) {
    float most_of = -1e30f, weight[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) most_of = fmaxf(most_of, each_log[w * 4 + n].x);
#pragma unroll
    for (int w = 0; w < WARPS; w++) weight[w] = ex2(each_log[w * 4 + n].x - most_of);
    const long long row = ((long long)b * heads + asks + n) * parts + part;
    for (int i = threadIdx.x; i < SLOTS; i += 32 * WARPS) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += weight[w] * gathered[(w * 4 + n) * SLOTS + i];
      out[row * SLOTS + i] = sum;
    }
    if (threadIdx.x == 0) {
      float4 log = make_float4(most_of, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        log.y += weight[w] * each_log[w * 4 + n].y;
        log.z += weight[w] * each_log[w * 4 + n].z;
        log.w += weight[w] * each_log[w * 4 + n].w;
      }
      logs[row] = log;
    }
  }
}
"""
