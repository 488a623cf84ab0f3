"""What `make test` leaves to `make test-all`: tests that take seconds and prove again what others
prove sooner, at another point or in another combination, or what few changes can break. CI runs
as many as its time allows (`--soak-until`, `tests/tiers.py`).

Whole files, and single tests of files; a name up to `[…` stands for the cases that begin so. The
mark `soak` at a test says the same."""

from __future__ import annotations

import pytest

FILES = (
    "tests/e2e/test_activator_user.py",
    "tests/e2e/test_blobs_in_s3.py",
    "tests/e2e/test_canary.py",
    "tests/e2e/test_cpu_outside_calls.py",
    "tests/e2e/test_dependencies.py",
    "tests/e2e/test_elsewhere.py",
    "tests/e2e/test_experiment.py",
    "tests/e2e/test_fair_starts.py",
    "tests/e2e/test_faults_user_code.py",
    "tests/e2e/test_frozen.py",
    "tests/e2e/test_function_network.py",
    "tests/e2e/test_kept_instances.py",
    "tests/e2e/test_knative_handover.py",
    "tests/e2e/test_knative_node_services.py",
    "tests/e2e/test_knative_scaled_by_us.py",
    "tests/e2e/test_loopback.py",
    "tests/e2e/test_objectives.py",
    "tests/e2e/test_snapshots_faults.py",
    "tests/e2e/test_snapshots_of_nodes.py",
    "tests/e2e/test_traces.py",
    "tests/e2e/test_traffic.py",
    "tests/e2e/test_weights_isolation.py",
    "tests/e2e/test_weights_leases.py",
    "tests/e2e/test_weights_loading.py",
    "tests/e2e/test_weights_sources.py",
    "tests/functions/controller/test_alert_kill.py",
    "tests/functions/worker/test_memory.py",
    "tests/snapshotter/environments/test_import_faults.py",
    "tests/snapshotter/images/test_pip_cache.py",
    "tests/weight_cache/peers/test_daemons.py",
)
TESTS = {
    "tests/e2e/test_drills.py": (
        "test_what_fails_comes_back_and_nothing_is_lost[activator",
        "test_what_fails_comes_back_and_nothing_is_lost[node",
        "test_what_fails_comes_back_and_nothing_is_lost[bad-route",
        "test_what_fails_comes_back_and_nothing_is_lost[weight-storm",
        "test_what_fails_comes_back_and_nothing_is_lost[redis",
    ),
    "tests/e2e/test_open_inference.py": (
        "test_the_official_clients_work",
        "test_an_activator_that_is_killed_comes_back_with_grpc",
    ),
    "tests/e2e/test_plan.py": ("test_a_plan_follows_from_a_load_test",),
    "tests/contracts/test_retention.py": (
        "test_old_revisions_without_traffic_are_pruned_and_then_deleted[postgresql",
    ),
    "tests/weight_cache/store/test_faults.py": (
        "test_what_passes_is_borne[status-500",
        "test_what_passes_is_borne[reset",
        "test_what_passes_is_borne[short",
        "test_what_passes_is_borne[slow",
        "test_what_does_not_pass_is_named_and_the_next_lease_starts_well[status-404",
        "test_what_does_not_pass_is_named_and_the_next_lease_starts_well[wrong",
        "test_what_does_not_pass_is_named_and_the_next_lease_starts_well[replaced",
        "test_file_that_changed_on_the_disk_is_never_served[truncated",
        "test_file_that_changed_on_the_disk_is_never_served[gone",
        "test_folder_that_may_not_be_written_is_named_and_works_again_when_it_may[partial",
        "test_folder_that_may_not_be_written_is_named_and_works_again_when_it_may[models",
        "test_folder_that_may_not_be_written_is_named_and_works_again_when_it_may[manifests",
    ),
    "tests/snapshotter/environments/test_imports.py": (
        "test_a_module_that_changes_earlier_ones_is_opened",
        "test_where_imports_differ_one_with_those_that_it_kept_to_is_tried",
        "test_a_function_that_imports_much_more_gets_one_of_its_own",
        "test_a_list_is_shortened_where_later_modules_change_what_earlier_ones_do",
        "test_a_module_that_starts_a_thread_is_left_out_by_name",
        "test_a_later_revision_that_answers_differently_switches_it_off_as_well",
        "test_code_that_begins_with_other_imports_starts_cold[import beta",
    ),
    "tests/snapshotter/images/oci/test_registry_base.py": (
        "test_it_can_have_a_python_of_this_machine",
        "test_steps_that_replace_its_python_by_a_link_are_refused",
    ),
    "tests/snapshotter/pods/test_restoring.py": (
        "test_a_pod_of_a_functions_own_image_receives_its_worker_in_that_root",
    ),
    "tests/activator/billing/test_journal_drain.py": (
        "test_killed_when_the_controller_has_taken_something_it_goes_on_where_it_was[/internal/calls",
        "test_killed_when_the_controller_has_taken_something_it_goes_on_where_it_was[/internal/due",
    ),
    "tests/activator/arguments/test_translations.py": (
        "test_translating_what_is_just_within_the_bounds_holds_nobody_up[predict",
    ),
    "tests/activator/billing/test_recovery.py": (
        "test_killed_at_any_step_no_record_is_lost_or_doubled",
    ),
    "tests/contracts/test_storage_contract.py": (
        "test_sweep_killed_in_the_middle_loses_nothing_that_is_needed[postgresql",
        "test_sweep_killed_in_the_middle_loses_nothing_that_is_needed[sqlite-before",
        "test_sweep_killed_in_the_middle_loses_nothing_that_is_needed[sqlite-after-3",
        "test_deploys_during_sweeps_have_their_blobs_or_fail[postgresql]",
    ),
    "tests/e2e/test_attacker.py": (
        "test_the_table_names_at_least_60_different_attempts[host",
        "test_every_attempt_was_made_and_proves_something[host",
        "test_what_must_be_denied_is_denied[host",
        "test_what_is_listed_as_open_is_still_open[host",
    ),
    "tests/e2e/test_knative_warm.py": (
        "test_a_call_beside_another_is_answered_by_a_fork_in_the_same_pod[kpa]",
        "test_starts_at_once_are_served_in_warm_pods_alone[kpa]",
        "test_a_function_with_packages_of_its_own_answers_from_a_warm_pod_booted_then_restored",
        "test_a_process_that_is_killed_while_a_pod_is_promoted[promoted-controller",
        "test_a_process_that_is_killed_while_a_pod_is_promoted[before-",
        "test_a_process_that_is_killed_while_a_pod_is_promoted[asked-activator",
        "test_a_process_that_is_killed_while_a_pod_is_promoted[asked-snapshotter",
        "test_a_process_that_is_killed_while_a_pod_is_promoted[asked-weight_cache",
        "test_a_process_that_is_killed_while_a_pod_is_promoted[promoted-weight_cache",
        "test_load_that_lasts_is_handed_over_to_pods_of_the_functions_own_without_a_lost_call[kpa]",
        "test_from_zero_with_a_warm_pod_to_its_end[kpa]",
    ),
    "tests/e2e/test_cli.py": (
        "test_down_and_up_after_a_killed_supervisor",
        "test_state_is_saved_while_running_and_loaded_into_another_home",
        "test_serve_deploys_again_on_a_change_and_removes_the_app_at_the_end",
        "test_keys_secrets_and_environments",
        "test_up_in_the_terminal_writes_the_first_key_refuses_a_second_and_ends_with_ctrl_c",
        "test_a_shell_keeps_its_variables_and_directory_between_lines",
        "test_an_up_that_fails_changes_no_login_and_the_next_one_loses_none",
    ),
    "tests/e2e/test_controller_user.py": (
        "test_home_of_an_earlier_release_is_its_own_now",
        "test_root_takes_the_home_back_where_the_uid_is_null_again",
        "test_a_backup_is_made_and_checked_while_it_runs",
        "test_deploys_calls_builds_and_weights_go_on",
        "test_code_that_takes_it_over_reaches_nothing_of_others[in the machine's]",
    ),
    "tests/e2e/test_faults_processes.py": (
        "test_a_killed_process_that_no_call_needs_is_noticed_by_nobody",
        "test_a_full_disk_refuses_the_deploy_and_leaves_everything_else_as_it_was",
        "test_warm_functions_go_on_and_deploys_say_when_to_come_again_while_controller_and_agent_are_down",
        "test_a_killed_instance_of_an_idempotent_function_is_noticed_by_nobody",
        "test_an_instance_that_the_operator_stops_costs_no_caller_an_error",
        "test_a_killed_template_is_noticed_by_nobody",
    ),
    "tests/e2e/test_jobs.py": (
        "test_a_schedule_makes_one_call_of_each_due_time_though_controller_and_activator_are_killed",
        "test_queued_calls_survive_the_end_of_everything",
        "test_a_dead_letter_is_sent_again_with_its_attempts_counting_on",
    ),
    "tests/e2e/test_knative.py": (
        "test_a_pod_that_is_evicted_with_a_call_in_it",
        "test_a_new_version_takes_over_a_rollback_brings_the_old_one_back_and_a_delete_leaves_nothing",
        "test_an_image_is_pushed_by_the_deploy_pulled_by_the_node_and_run",
        "test_while_the_api_server_is_away_pods_serve_and_calls_that_need_one_are_told_why[silent]",
    ),
    "tests/e2e/test_several_activators.py": (
        "test_both_serve_and_never_hold_more_instances_together_than_the_function_may_have",
        "test_a_submitted_call_is_found_and_cancelled_through_either",
        "test_both_together_grant_a_key_its_quota_once",
    ),
    "tests/e2e/test_snapshots.py": (
        "test_a_rollback_starts_by_restore_and_a_deleted_app_leaves_no_image",
        "test_a_deleted_snapshot_is_gone_from_the_disk_and_made_again_behind_a_cold_start",
        "test_disable_takes_it_off_the_disk_and_enable_lets_the_next_deploy_make_one",
        "test_a_hook_that_fails_everywhere_is_the_callers_error_in_due_time",
        "test_a_hook_that_fails_after_a_restore_only_lets_the_call_fall_to_cold",
    ),
    "tests/e2e/test_weights.py": (
        "test_prefetch_brings_them_and_verify_finds_what_the_disk_has_damaged",
        "test_a_deploy_enters_what_it_declares_and_a_name_that_is_not_used_can_go",
        "test_pull_brings_every_byte_back_and_the_second_time_none",
        "test_pin_survives_a_restart_of_the_cache_and_unpin_ends_it",
    ),
    "tests/examples/test_examples.py": (
        "test_single_sentences_share_passes_and_an_empty_one_fails_alone",
        "test_embed_knows_what_belongs_together",
        "test_tabular_ranks_the_better_candidate_first",
        "test_canary_plays_a_good_release_and_a_bad_one",
    ),
    "tests/examples/test_modal_style.py": (
        "test_web_applications_with_packages_of_their_own_answer",
    ),
    "tests/functions/controller/test_dashboard_browser.py": (
        "test_no_page_is_wider_than_a_phone",
        "test_signing_out_ends_every_tab_and_a_kept_cookie_is_worth_nothing",
        "test_a_revoked_key_ends_the_page_that_is_open",
        "test_what_happens_shows_without_a_reload",
        "test_dark_and_light_follow_the_system_until_somebody_chooses",
        "test_a_key_that_reads_bills_sees_money_and_no_machine",
        "test_a_trace_is_found_by_its_reason_and_opened",
        "test_a_chart_that_cannot_be_drawn_leaves_its_table_open",
        "test_an_invoice_downloads_with_the_sum_of_its_records",
        "test_the_keyboard_reaches_everything_and_its_place_is_seen",
        "test_a_tenant_that_did_nothing_yet_is_told_what_to_do",
    ),
    "tests/functions/controller/test_database_bounds.py": (
        "test_histories_of_a_tenant_have_a_bound_and_the_newest_of_each_app_stay",
        "test_revisions_of_a_tenant_have_a_bound_and_those_that_were_given_up_go",
        "test_kept_results_of_a_tenant_have_a_bound_and_the_oldest_go",
        "test_an_apps_history_keeps_what_is_looked_at",
    ),
    "tests/functions/controller/test_elsewhere.py": (
        "test_the_first_key_is_made_where_the_operator_cannot_start_the_platform",
        "test_who_has_a_certificate_of_the_platform_follows_the_feed",
        "test_a_second_controller_stands_by_until_it_is_told_to_stop",
    ),
    "tests/functions/controller/statistics/test_estimates.py": (
        "test_looking_after_every_fifty_calls_shows_a_difference_that_is_not_there_in_one_of_twenty_at_most[rare errors",
        "test_looking_after_every_fifty_calls_shows_a_difference_that_is_not_there_in_one_of_twenty_at_most[milliseconds",
    ),
    "tests/functions/controller/test_faults.py": (
        "test_a_plan_that_changed_in_the_file_reaches_activators_and_one_that_is_gone_is_said",
        "test_killed_in_the_middle_of_deploys_it_comes_back_whole",
        "test_a_second_controller_is_refused_and_the_first_goes_on",
    ),
    "tests/functions/controller/test_process_user.py": (
        "test_one_that_stood_by_in_the_same_home_takes_over_without_root",
        "test_with_postgresql_it_serves_without_root",
    ),
    "tests/functions/packaging/oci/test_export.py": (
        "test_an_image_from_nothing_serves_in_a_read_only_root_as_nobody",
        "test_an_image_on_a_base_has_its_own_code_and_none_of_the_base",
    ),
    "tests/snapshotter/test_engine.py": (
        "test_one_that_answers_wrongly_is_set_aside_and_its_caller_is_served_cold",
        "test_one_that_does_not_stand_its_proof_is_never_used",
    ),
    "tests/snapshotter/images/test_image_isolation.py": (
        "test_tenants_build_the_same_description_each_for_itself",
    ),
    "tests/snapshotter/images/test_images.py": (
        "test_copy_steps_are_fetched_from_a_bucket",
        "test_steps_run_in_order_and_the_image_serves[None]",
        "test_conflict_with_the_workers_requirements_names_both[plold",
        "test_build_that_makes_files_without_end_is_ended_while_inodes_are_left",
    ),
    "tests/snapshotter/shim/test_event_loop.py": (
        "test_a_flood_of_output_costs_the_shim_little_cpu[short lines]",
        "test_a_flood_of_messages_of_a_worker_costs_the_shim_little_cpu[long]",
    ),
    "tests/snapshotter/test_restore.py": (
        "test_a_hook_that_fails_in_forks_of_a_restored_template_falls_to_cold_too",
        "test_a_hook_that_hangs_after_a_restore_falls_to_cold_in_time",
        "test_a_launch_that_differs_is_not_served_from_the_snapshot",
        "test_a_template_that_comes_back_from_a_snapshot_that_is_no_good_takes_no_place_of_one_that_is_booted",
        "test_a_deleted_snapshot_has_no_copy_left",
    ),
    "tests/snapshotter/slots/test_slot_faults.py": ("test_after_fifty_restores_nothing_is_left",),
    "tests/test_leftovers.py": (
        "test_process_that_outlives_the_run_fails_it_and_is_named_with_its_test[xdist]",
        "test_orphan_with_an_empty_environment_is_found_by_the_process_that_adopted_it",
        "test_run_that_leaves_nothing_passes",
    ),
    "tests/test_monitoring.py": ("test_every_alert_fires_when_it_should_and_not_before",),
    "tests/weight_cache/store/test_crashes.py": (
        "test_killed_before_every_step[small-150-False]",
        "test_killed_before_every_step[large-25-True]",
    ),
}


def is_soak(item: pytest.Item) -> bool:
    """Whether a test is marked so, or listed here."""
    return item.get_closest_marker("soak") is not None or is_listed(item.nodeid)


def is_listed(nodeid: str) -> bool:
    """Whether a test is listed here."""
    file, _, name = nodeid.partition("::")
    if file in FILES:
        return True
    return any(
        name.startswith(one) if "[" in one else name.partition("[")[0] == one
        for one in TESTS.get(file, ())
    )
