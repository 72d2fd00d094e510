// Receive keypoints from the node: ros2 run kp2d_subscriber subscriber
#include <memory>

#include <rclcpp/rclcpp.hpp>

#include "keypoints.hpp"

class Subscriber : public rclcpp::Node
{
public:
  Subscriber()
  : Node("subscriber")
  {
    using Cloud = sensor_msgs::msg::PointCloud2;
    keypoints_ = create_subscription<Cloud>(
      "kp2d/keypoints", 10, [this](const Cloud & cloud) {
        size_t known = 0;
        const auto keypoints = read_keypoints(cloud);
        for (const auto & keypoint : keypoints) {known += keypoint.track_age > 0;}
        RCLCPP_INFO(get_logger(), "%zu keypoints, %zu seen before", keypoints.size(), known);
      });
    matches_ = create_subscription<Cloud>(
      "kp2d/matches", 10, [this](const Cloud & cloud) {
        RCLCPP_INFO(get_logger(), "%zu inliers", read_inliers(cloud).size());
      });
  }

private:
  rclcpp::SubscriptionBase::SharedPtr keypoints_, matches_;
};

int main(int argc, char ** argv)
{
  rclcpp::init(argc, argv);
  rclcpp::spin(std::make_shared<Subscriber>());
  rclcpp::shutdown();
  return 0;
}
