"""The Spark session: found or started, its Java, its log, its jobs, its errors."""
