"""What autocast does with each primitive of jax."""

# The primitives of jax 0.10 to 0.12. A primitive that a later jax brings has to be sorted into one of these.
HOW: dict[str, str] = {
    "in half": "dot_general conv_general_dilated ragged_dot_general",
    "in float32": """
        acos acosh asin asinh atanh cbrt cosh erf_inv exp exp2 expm1 integer_pow log log1p log2 pow rsqrt sinh
        square tan bessel_i0e bessel_i1e digamma igamma igammac lgamma polygamma regularized_incomplete_beta
        cholesky eig eigh fft geqrf hessenberg householder_product lu lu_pivots_to_permutation qr schur svd
        triangular_solve tridiagonal tridiagonal_solve cumlogsumexp cumprod cumsum reduce reduce_prod reduce_sum
        reduce_window reduce_window_sum scatter-add scatter-mul select_and_scatter_add""",
    "each operand as it is": """
        device_put layout_constraint name optimization_barrier relayout reshard sharding_constraint sort
        with_memory_space_constraint""",
    "moved": "broadcast_in_dim copy pvary reshape rev slice squeeze stop_gradient transpose",
    "in the highest-precision type of its operands": """
        abs add add_any argmax argmin atan atan2 ceil clamp concatenate cos cummax cummin div dynamic_slice
        dynamic_update_slice eq erf erfc floor gather ge gt imag is_finite le logistic lt max min mul ne neg pad
        real reduce_max reduce_min reduce_window_max reduce_window_min rem round scatter select_n sign sin split
        sqrt stack sub tanh tile top_k unstack""",
    "converted": "convert_element_type",
    "exchanged between devices as it is": "all_to_all ppermute",
    "entered": """
        closed_call cond custom_jvp_call custom_vjp_call jit remat2 scan shard_map while""",
    # Random bits, whole numbers and bits have no dtype that autocast would change.
    "without floats": """
        and axis_index clz create_token after_all dimension_size dim_as_value eq_to from_edtype to_edtype le_to lt_to
        iota iota_2x32_shape mulhi multiple_of not num_programs or philox2x32 philox4x32 platform_index
        population_count program_id random_bits random_clone random_fold_in random_seed random_split random_unwrap
        random_wrap reduce_and reduce_or reduce_xor rng_bit_generator shift_left shift_right_arithmetic
        shift_right_logical threefry2x32 threefry4x32 unreachable xor zeros_like empty empty2 empty_ref""",
    # In the dtypes that the plain function has: float32 operands and results.
    "as traced: arithmetic": """
        approx_top_k bitcast_convert_type cholesky_update complex conj geqp3 igamma_grad_a nextafter one_minus_square
        ormqr polynomial random_gamma reciprocal reduce_precision rng_uniform scaled_dot scaled_matmul
        scaled_matmul_wrapper scatter-max scatter-min scatter-sub select_and_gather_add select_and_scatter
        symmetric_product zeta broadcast_to""",
    "as traced: over devices, whose sums are not for half": """
        all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start all_gather_start
        all_to_all_done all_to_all_start pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start
        pmax pmin ppermute_done ppermute_start precv preduced psend psum psum_done psum_invariant
        psum_invariant_start psum_start ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start
        reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start
        unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p
        global_array_to_host_local_array host_local_array_to_global_array""",
    "as traced: programs with rules of their own": """
        call call_exported call_hi_primitive call_hi_primitive_linearized composite core_map create_linear
        custom_jvp_call_jaxpr custom_lin custom_linear_solve custom_partitioning custom_vmap_call cudnn_fusion
        eval_jaxpr ffi_call jaxpr_call linear_call mpmd_map pallas_call remat_opt run_scoped run_state stage
        xla_metadata_call xla_metadata_value dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
        dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper""",
    "as traced: references, boxes and logs": """
        accum_grad_in_ref addupdate box_get box_set free_ref freeze get get_global log_extend log_read masked_load
        masked_swap new_box new_log new_ref pin semaphore_read semaphore_signal semaphore_wait swap tie unpin
        dce_sink""",
    "as traced: callbacks and checks": """
        check debug_callback debug_print delay inspect_sharding io_callback pure_callback shape_assertion""",
    "as traced: sparse matrices": """
        bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general
        bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
        coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec
        csr_spmm csr_spmv csr_todense spsolve todense""",
}  # fmt: skip
