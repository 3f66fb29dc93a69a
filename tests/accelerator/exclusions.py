"""The engine's tests that `make test-accelerator` leaves out, and why."""

_LATE = "acts when the record of a step arrives, which on a device is some steps later"
_GUARD = "on a device a bad step is examined after its update (docs/concepts/failing.md)"
_KERNEL = "an error of a kernel arrives at the next wait, without its layer"
_PROCESS = "starts a process of its own, where the device is not registered"
_SPARSE = "the simulated device has no sparse tensors"
_ROUNDING = "exact for the CPU's kernels; cells, attention and foreach updates round differently"
_LISTS = "compares with the CPU's lists of autocast"
_HOST = "tests the CPU's own way"
_CLOCK = "the simulated clock counts operations and not how long the device waits for the host"
_LAYOUT = "the simulated device plans the outputs of convolutions as contiguous"
_FUSED = "the cell is one operation there: its last state, which nothing reads, has no gradient"

_BY_REASON: dict[str, tuple[str, ...]] = {
    _LATE: (
        "test_command_sequences.py::test_a_rate_set_to_0_and_back_is_where_the_schedule_would_be",
        "test_command_sequences.py::test_a_schedule_that_began_with_0_can_be_given_a_rate",
        "test_commands.py::test_a_learning_rate_that_is_set_at_a_step_equals_torch_by_hand",
        "test_commands.py::test_what_was_applied_before_a_restart_is_applied_again_at_its_own_step",
        "test_commands.py::test_a_new_value_that_does_not_hold_any_more_is_rejected",
        "test_commands.py::test_training_can_be_made_longer_and_shorter",
        "test_commands.py::test_a_clip_threshold_holds_from_its_step_on",
        "test_commands.py::test_commands_run_after_the_current_step",
        "test_commands.py::test_a_fork_is_what_a_continuation_by_hand_is",
        "test_command_sequences.py::test_a_job_resumed_after_its_rate_was_set_is_the_one",
        "test_early.py::test_training_ends_and_says_why",
        "test_early.py::test_an_evaluation_that_was_asked_for_does_not_count",
        "test_early.py::test_patience_can_be_changed_while_it_runs",
        "test_resuming.py::test_a_run_that_was_stopped_continues",
        "test_schedulers.py::test_another_rate_is_another_base_of_the_schedule",
        "test_schedulers.py::test_another_rate_scales_swa_lr_and_the_average_is_of_what_follows",
        "test_training.py::test_cancelling_ends_at_the_step_boundary_with_a_checkpoint",
        "test_watching.py::test_attaching_changing_and_removing_change_no_bit",
    ),
    _GUARD: (
        "test_accumulating.py::test_a_guard_finds_the_bad_row_in_whichever_batch_of_the_step",
        "test_augmented_training.py::test_the_guard_names_rows_that_only_their_change_has_spoilt",
        "test_carrying.py::test_a_finding_is_of_the_state_that_the_step_began_with",
        "test_diverging.py::",
        "test_failing.py::test_bad_numbers_are_blamed_on_the_first_layer_that_made_them",
        "test_failing.py::test_bad_parameters_are_blamed_before_what_they_put_out",
        "test_guarding.py::test_a_gradient_that_goes_bad_names_the_layer_and_what_gives_it_back",
        "test_guarding.py::test_a_job_that_is_to_fail_says_where_and_keeps_its_last_good",
        "test_guarding.py::test_by_default_a_bad_loss_is_reported_once_and_training_continues",
        "test_guarding.py::test_too_many_skipped_in_a_row_end_the_job",
        "test_guarding.py::test_what_is_skipped_over_is_not_blamed",
        "test_losses_of_batches.py::test_a_bad_row_is_found_behind_micro_batches_without_targets",
        "test_recording.py::test_a_loss_that_is_nan_or_inf_is_bad_too_and_the_step_is_kept_whole",
        "test_recording.py::test_of_the_bad_step_the_part_is_kept_that_was_asked_for",
        "test_recording.py::test_the_tensors_before_and_after_the_bad_one_are_of_its_step",
        "test_data_parallel.py::test_a_bad_row_of_another_process_is_found",
        "test_pipeline.py::test_the_first_layer_that_is_not_finite_is_found",
        "test_tensor_parallel.py::test_a_value_that_is_not_finite_is_found_in_a_divided_layer",
        "test_streaming.py::test_the_rows_of_a_bad_step_are_found_again_in_their_files",
    ),
    _KERNEL: (
        "test_failing.py::test_a_loss_that_fails_is_named_as_the_layer",
        "test_guarding.py::test_a_layer_that_fails_is_run_again_with_the_mask_of_the_step",
        "test_tuning.py::test_a_trial_that_fails_is_not_what_ends_the_job",
    ),
    _PROCESS: (
        "test_fork_server.py::",
        "test_killed.py::",
        "test_memory_guard.py::test_more_than_the_cap_is_out_of_memory_and_parts_need_less",
        "test_resume_matrix.py::",
        "test_saving.py::test_no_room_for_a_checkpoint_ends_nothing_and_harms_nothing",
    ),
    _SPARSE: (
        "test_command_sequences.py::test_no_sequence_of_settings_ends_a_job_with_two_optimizers",
        "test_data_parallel.py::test_networks_over_tokens_learn_as_in_one_process[sparse",
        "test_fifty_steps.py::test_sparse_adam_takes_the_steps_that_torch_takes",
        "test_layer_options.py::test_sparse_gradients_are_clipped_as_dense_ones_are",
        "test_presets.py::test_two_towers_learn_who_likes_what",
        "test_presets.py::test_cbow_learns_the_word_between_its_neighbors",
        "test_scaling.py::test_a_pair_of_optimizers_leaves_out_both_updates_or_none",
        "test_sparse_beside_dense.py::",
        "test_sparse_fields.py::test_a_bag_trains_as_a_linear_layer_over_the_whole_vector",
        "test_sparse_fields.py::test_sparse_adam_moves_the_rows_that_were_read_and_no_other",
        "test_training.py::test_sparse_adam_trains_what_has_sparse_gradients_only",
        "test_what_can_be_watched.py::test_figures_of_a_sparse_gradient_count_the_absent_rows",
    ),
    _ROUNDING: (
        "test_pipeline.py::test_settings_have_the_effect_of_one_process[bfloat16",
        "test_carrying.py::test_it_is_trained_as_one_long_sequence_cut_into_pieces",
        "test_fifty_steps.py::test_each_optimizer_takes_the_steps_that_torch_takes[ASGD]",
        "test_fifty_steps.py::test_each_optimizer_takes_the_steps_that_torch_takes[NAdam]",
        "test_fifty_steps.py::test_each_optimizer_takes_the_steps_that_torch_takes[RAdam]",
        "test_kinds.py::test_every_kind_is_what_autograd_gives[lstm]",
        "test_kinds.py::test_every_kind_is_what_autograd_gives[transformer]",
        "test_watching.py::test_the_statistics_of_a_relu_and_of_its_input_are_those_of_their",
    ),
    _LISTS: (
        "test_precision.py::test_training_is_that_of_autocast_by_hand_bit_for_bit",
        "test_precision.py::test_evaluations_are_in_the_same_precision_and_their_loss_in_float32",
        "test_scaling.py::test_a_schedule_stays_where_it_is_at_steps_that_overflow",
        "test_scaling.py::test_an_output_s_gradient_is_clipped_at_limits_that_are_scaled",
        "test_scaling.py::test_an_overflow_is_no_finding",
        "test_scaling.py::test_batches_that_make_a_step_have_one_scale_and_one_update",
        "test_scaling.py::test_fifty_steps_are_those_of_a_grad_scaler_by_hand_bit_for_bit",
        "test_scaling.py::test_gradients_are_clipped_as_they_are_without_the_scale",
        "test_scaling.py::test_what_is_watched_is_without_the_scale_and_changes_no_bit",
    ),
    _HOST: (
        "test_failing.py::test_an_error_of_memory_without_figures_keeps_its_words",
        "test_on_cuda.py::",
    ),
    _CLOCK: (
        "test_cuda.py::test_a_clock_of_events_measures_what_the_device_does",
        "test_cuda.py::test_the_governor_measures_with_the_devices_clock",
        "test_timing.py::test_the_time_of_the_data_is_attributed_to_the_data",
        "test_timing.py::test_the_time_that_derived_series_take_is_their_own",
        "test_timing.py::test_the_time_that_hooks_take_is_that_of_the_probes",
    ),
    _LAYOUT: ("test_tuning.py::test_the_layout_is_what_was_asked_for",),
    _FUSED: (
        "test_what_can_be_watched.py::test_a_step_shows_exactly_what_the_plan_says"
        "[Adam-an opened LSTM]",
        "test_what_can_be_watched.py::test_a_step_shows_exactly_what_the_plan_says"
        "[Adagrad-an opened LSTM]",
    ),
}
EXCLUDED = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""The reason by the beginning of a test's name."""


def reason_for(node_id: str) -> str | None:
    """Return why a test does not run on the simulated device; None: it does."""
    name = node_id.rpartition("/")[2]
    return next((why for start, why in EXCLUDED.items() if name.startswith(start)), None)
