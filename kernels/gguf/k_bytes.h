/* K-quants times one or two rows of x in bytes, with AVX-512: weights are unpacked 64 at a time and not widened.

   x = 256 u + l, and `vpmaddubsw` multiplies the bytes of W, which have no sign, by those of u and of l; `vpdpwssd`
   multiplies sums of two products by the scale of their group. One row of x takes 14 to 20% less time than with W in
   int16, and the sums are those of `k_dot`, lane by lane. With more rows of x the two products cost more than is saved. */

#ifndef K_BYTES_H
#define K_BYTES_H

#ifdef __AVX512F__
/* Weights of groups g and g + 1 of a superblock, g even, without their sign: columns as in `Few.bytes`. */
INLINE __m512i value_bytes(int type, const uint8_t *block, int g) {
    const __m512i nibble = _mm512_set1_epi8(15);
    if (type == Q6_K) {
        const int part = g / 4, is_second = g % 4 > 0;
        const __m512i first = _mm512_cvtepu16_epi32(load32(block + 64 * part));
        const __m512i second = _mm512_cvtepu16_epi32(load32(block + 64 * part + 32));
        const __m512i low = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
        const __m512i two = _mm512_cvtepu16_epi32(load32(block + 128 + 32 * part));
        const __m512i high = _mm512_or_si512(two, _mm512_slli_epi32(two, 14));
        return _mm512_or_si512(_mm512_and_si512(is_second ? _mm512_srli_epi32(low, 4) : low, nibble),
                               _mm512_and_si512(is_second ? high : _mm512_slli_epi32(high, 4), _mm512_set1_epi8(0x30)));
    }
    const __m512i both = _mm512_cvtepu16_epi32(load32(block + (type == Q4_K ? 16 : 48) + 16 * g));
    const __m512i low = _mm512_and_si512(_mm512_or_si512(both, _mm512_slli_epi32(both, 12)), nibble);
    if (type == Q4_K) return low;
    const __m512i bits = _mm512_cvtepu16_epi32(load32(block + 16));
    const __m512i fifth = _mm512_or_si512(bits, _mm512_slli_epi32(bits, 15));
    const __m512i moved = g > 4 ? _mm512_srli_epi32(fifth, g - 4) : _mm512_slli_epi32(fifth, 4 - g);
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(16)));
}

/* Scales of groups g and g + 1 for sums of two columns each. Q6_K has one for each half of a group.
   pairs: of 16 bits each, by g / 2. */
INLINE __m512i scale_pairs(int type, const uint8_t *block, const int32_t pairs[4], int g) {
    if (type != Q6_K) return _mm512_set1_epi32(pairs[g / 2]);
    const __m256i all = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(block + 192)));
    const __m512i first = _mm512_set1_epi32(2 * g | (2 * g + 2) << 16);
    const __m512i which = _mm512_mask_add_epi16(first, 0xffff0000, first, _mm512_set1_epi16(1));
    return _mm512_permutexvar_epi16(which, _mm512_castsi256_si512(all));
}

/* Sums of two products each of weights and bytes of x. */
INLINE __m512i byte_products(int type, __m512i weights, __m512i x) {
    const __m512i products = _mm512_maddubs_epi16(weights, x);
    if (type != Q6_K) return products;
    return _mm512_sub_epi16(products, _mm512_maddubs_epi16(_mm512_set1_epi8(32), x));
}

/* y: of one row of W, see `place`. */
INLINE void k_bytes_dot(int type, const uint8_t *row, const Few *few, const int M, float *y) {
    const int size = type == Q4_K ? 144 : type == Q5_K ? 176 : 210;
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    __m256 offsets[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int group = 0; group < few->columns / 32; group += 8) {
        const uint8_t *const block = row + size * (group / 8);
        uint8_t scales[8], minima[8];
        int32_t pairs[4];
        if (type != Q6_K) {
            scales_and_minima(block + 4, scales, minima);
            _mm_storeu_si128((__m128i *)pairs, _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)scales)));
        }
        __m512i upper[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, lower[2] = {upper[0], upper[0]};
        #pragma GCC unroll 4
        for (int g = 0; g < 8; g += 2) {
            if (32 * g < size) prefetch_ahead(block + 32 * g, few);
            const __m512i w = value_bytes(type, block, g), scale = scale_pairs(type, block, pairs, g);
            for (int m = 0; m < M; m++) {
                const int8_t *const x = few->bytes + 2 * ((long)m * few->columns + 32 * (group + g));
                upper[m] = _mm512_dpwssd_epi32(upper[m], byte_products(type, w, _mm512_loadu_si512(x)), scale);
                lower[m] = _mm512_dpwssd_epi32(lower[m], byte_products(type, w, _mm512_loadu_si512(x + 64)), scale);
            }
        }
        const __m512 d = _mm512_set1_ps(half(block + (type == Q6_K ? 208 : 0)));
        for (int m = 0; m < M; m++) {
            const __m512i products = _mm512_add_epi32(_mm512_slli_epi32(upper[m], 8), lower[m]);
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), d, sums[m]);
        }
        if (type == Q6_K) continue;
        const __m256i least = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)minima));
        const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(half(block + 2)), _mm256_cvtepi32_ps(least));
        for (int m = 0; m < M; m++)
            offsets[m] = _mm256_fmadd_ps(scaled, _mm256_loadu_ps(sums_of(few, m, group)), offsets[m]);
    }
    for (int m = 0; m < M; m++)
        *place(y, m, 0) = _mm512_reduce_add_ps(_mm512_sub_ps(sums[m], _mm512_zextps256_ps512(offsets[m])));
}
#endif

#endif
