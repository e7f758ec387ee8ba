"""Run external programs as the supervised stages of an ETL pipeline."""
