// Reading the clouds of the keypoint node; docs/messages.md lists their fields.
#pragma once

#include <cstdint>
#include <vector>

#include <sensor_msgs/msg/point_cloud2.hpp>
#include <sensor_msgs/point_cloud2_iterator.hpp>

struct Keypoint
{
  float u, v;  // pixels
  float score;
  uint32_t track_id, track_age;
};

inline std::vector<Keypoint> read_keypoints(const sensor_msgs::msg::PointCloud2 & cloud)
{
  sensor_msgs::PointCloud2ConstIterator<float> u(cloud, "u"), v(cloud, "v"), score(cloud, "score");
  sensor_msgs::PointCloud2ConstIterator<uint32_t> id(cloud, "track_id"), age(cloud, "track_age");
  std::vector<Keypoint> keypoints;
  for (; u != u.end(); ++u, ++v, ++score, ++id, ++age) {
    keypoints.push_back({*u, *v, *score, *id, *age});
  }
  return keypoints;
}

struct Match
{
  float u, v, previous_u, previous_v;  // pixels
};

// Those that agree with the geometry between the two frames.
inline std::vector<Match> read_inliers(const sensor_msgs::msg::PointCloud2 & cloud)
{
  sensor_msgs::PointCloud2ConstIterator<float> now(cloud, "u"), before(cloud, "previous_u");
  sensor_msgs::PointCloud2ConstIterator<uint32_t> inlier(cloud, "inlier");
  std::vector<Match> matches;
  for (; now != now.end(); ++now, ++before, ++inlier) {
    if (*inlier) {
      matches.push_back({now[0], now[1], before[0], before[1]});  // v follows u in memory
    }
  }
  return matches;
}
